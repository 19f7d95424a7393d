# pyright: basic
"""Programs that try to gain privileges, or to reach more of the kernel."""

import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_NS, NEW_PID, NEW_NET = 0x10000000, 0x20000, 0x20000000, 0x40000000
X86 = os.uname().machine == "x86_64"


def kernel_log(at):
    buffer = ctypes.create_string_buffer(4096)
    return LIBC.klogctl(3, buffer, 4096) >= 0


def remount(at):
    return LIBC.mount(None, b"/", None, 32, None) == 0


def mount(at):
    return LIBC.mount(b"tmpfs", b"/usr", b"tmpfs", 0, None) == 0


def unmount(at):
    return LIBC.umount2(b"/usr/lib", 2) == 0


def other_root(at):
    os.chroot("/usr")
    return True


def user_namespace(at):
    return LIBC.unshare(NEW_USER) == 0


def all_namespaces(at):
    return LIBC.unshare(NEW_USER | NEW_NS | NEW_PID | NEW_NET) == 0


def namespace_by_clone(at):
    child = LIBC.syscall(56 if X86 else 220, NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child > 0


def namespace_by_clone3(at):
    arguments = (ctypes.c_uint64 * 11)(NEW_USER, 0, 0, 0, signal.SIGCHLD)
    child = LIBC.syscall(435, arguments, ctypes.sizeof(arguments))
    if child == 0:
        os._exit(0)
    return child > 0


def namespace_of_the_first_process(at):
    descriptor = os.open("/proc/1/ns/mnt", os.O_RDONLY)
    return LIBC.setns(descriptor, 0) == 0


def trace(at):
    return any(LIBC.ptrace(16, pid, 0, 0) == 0 for pid in (1, os.getppid(), at["gateway"]) if pid)


def memory_of_another(at):
    vector = (ctypes.c_uint64 * 2)()
    return LIBC.process_vm_readv(1, vector, 1, vector, 1, 0) >= 0


def become_root(at):
    os.setresuid(0, 0, 0)
    return os.getuid() == 0


def other_groups(at):
    os.setgroups([0])
    return True


def raise_limits(at):
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    raised = False
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        try:
            resource.setrlimit(kind, unlimited)
            raised = True
        except (ValueError, OSError):
            continue
    return raised


def shell(at):
    return subprocess.run(["/bin/sh", "-c", "id"], check=False).returncode == 0


def another_python(at):
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    return True


def pickled_command(at):
    return pickle.loads(b"cos\nsystem\n(S'true'\ntR.") == 0


def daemon(at):
    """Two forks and a session of its own, to outlive the process that is waited for."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return True


def set_the_clock(at):
    time.clock_settime(time.CLOCK_REALTIME, 0)
    return True


def restart_the_machine(at):
    return LIBC.reboot(0x01234567) == 0


def into_the_kernel(at):
    """io_uring_setup, bpf, perf_event_open, userfaultfd, keyctl, shmget, and others."""
    numbers = (425, 321, 298, 323, 250, 29, 68, 303, 175) if X86 else (425, 280, 241, 282, 219, 194)
    buffer = ctypes.create_string_buffer(256)
    return any(LIBC.syscall(number, 0, buffer, 128, 0, 0) >= 0 for number in numbers)


def other_calling_convention(at):
    """The numbers of the 32 bit ABI, which a filter may have forgotten."""
    return LIBC.syscall(0x40000000 | 41, 2, 1, 0) >= 0


def numbers_that_wrap(at):
    """A socket's, with bits that an int does not have."""
    call = 41 if X86 else 198
    numbers = (call | 1 << 32, call - 2**32, -call)
    return any(LIBC.syscall(ctypes.c_long(number), 2, 1, 0) > 2 for number in numbers)


def processes_by_descriptor(at):
    """pidfd_open, pidfd_getfd, process_madvise, kcmp, process_vm_writev, move_pages."""
    numbers = (434, 438, 440, 312, 311, 279) if X86 else (434, 438, 440, 272, 271, 239)
    return any(LIBC.syscall(number, 1, 0, 0, 0, 0, 0) >= 0 for number in numbers)


def landlock_and_new_mounts(at):
    """landlock_create_ruleset, open_tree, move_mount, fsopen, fsmount, mount_setattr."""
    return any(
        LIBC.syscall(number, 0, 0, 0, 0, 0) >= 0 for number in (444, 428, 429, 430, 432, 442)
    )


def asynchronous_reads(at):
    """These are limited for the whole machine: one process can use up all."""
    context = ctypes.c_ulong()
    return LIBC.syscall(0 if not X86 else 206, 65536, ctypes.byref(context)) == 0


def asynchronous_reads_without_a_context(at):
    return LIBC.syscall(2 if not X86 else 209, 0, 0, None) == 0


def filter_of_its_own(at):
    """Classic BPF that allows all: needless, but the kernel would check and compile it."""
    line = (ctypes.c_uint16 * 4)(0x06, 0, 0, 0x7FFF)

    class SystemCallFilter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_void_p)]

    program = SystemCallFilter(1, ctypes.addressof(line))
    by_prctl = LIBC.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
    return by_prctl or LIBC.syscall(317 if X86 else 277, 1, 0, ctypes.byref(program)) == 0


def options_of_the_process(at):
    """Dumpable, timer slack, a name, the tracer, the reaper of orphans."""
    options = ((4, 1), (29, 1), (15, b"other"), (0x59616D61, -1), (36, 1))
    return any(LIBC.prctl(option, value, 0, 0, 0) == 0 for option, value in options)


def pipe_of_notices(at):
    os.pipe2(0x80)
    return True


def pages_from_pipe_to_pipe(at):
    reader, writer = os.pipe()
    other = os.pipe()
    os.write(writer, b"x" * 4096)
    splice, tee = (275, 276) if X86 else (76, 77)
    return any(
        LIBC.syscall(number, *arguments) >= 0
        for number, arguments in (
            (tee, (reader, other[1], 4096, 2)),
            (splice, (reader, None, other[1], None, 4096, 2)),
        )
    )


def pages_into_a_pipe(at):
    vector = (ctypes.c_void_p * 2)(id(at), 16)
    return LIBC.vmsplice(os.pipe()[1], vector, 1, 0) >= 0


def flags_of_a_file(at):
    """An ioctl of the file system itself."""
    with open(os.__file__) as file:
        return LIBC.ioctl(file.fileno(), 0x80086601, ctypes.byref(ctypes.c_long())) == 0


def huge_pages(at):
    LIBC.mmap.restype = ctypes.c_void_p
    address = LIBC.mmap(None, ctypes.c_size_t(2**21), 3, 0x40022, -1, ctypes.c_long(0))
    return address not in (None, 2**64 - 1)


def descriptors_that_tell(at):
    """timerfd_create, signalfd4, eventfd2, epoll_create1."""
    mask = ctypes.c_uint64(1)
    calls = {
        283 if X86 else 85: (1, 0),
        289 if X86 else 74: (-1, ctypes.byref(mask), 8, 0),
        290 if X86 else 19: (0, 0),
        291 if X86 else 20: (0,),
    }
    return any(LIBC.syscall(number, *arguments) >= 0 for number, arguments in calls.items())


def memory_by_number(at):
    """set_mempolicy, get_mempolicy, remap_file_pages, pkey_alloc, membarrier, mlockall."""
    numbers = (238, 239, 216, 330, 324, 151) if X86 else (237, 236, 234, 289, 283, 230)
    return any(LIBC.syscall(number, 0, 0, 0, 0, 0) >= 0 for number in numbers)


def younger_calls(at):
    """System calls that a kernel newer than the filter may have."""
    buffer = ctypes.create_string_buffer(4096)
    return {LIBC.syscall(number, buffer, 64, 0, 0, 0, 0) for number in range(440, 600)} != {-1}


def another_program(at):
    """Execute another program in this process: the limits stay."""
    for path in ("/bin/sh", "/usr/bin/env", "/bin/busybox"):
        try:
            os.execv(path, [path])
        except OSError:
            continue
    return False


def a_thread(at):
    threading.Thread(target=print).start()
    return True


def fork_bomb(at):
    return any(tried() for tried in [os.fork] * 1000)


def thread_bomb(at):
    threading.stack_size(2**16)
    for _ in range(100_000):
        threading.Thread(target=time.sleep, args=(600,)).start()
    return True
