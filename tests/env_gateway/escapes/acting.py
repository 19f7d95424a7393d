# pyright: basic
"""Programs that want to change something, or to become more than they are."""

import ctypes
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_NS, NEW_PID, NEW_NET = 0x10000000, 0x20000, 0x20000000, 0x40000000
X86 = os.uname().machine == "x86_64"


def written(at, act):
    """Tries `act` on a new name in every folder there may be."""
    folders = [at["folder"], "/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/usr/lib"]
    folders += ["/verifier", "/verifier/services/env_gateway/verify", sys.prefix, *sys.path]
    harm = False
    for folder in folders:
        try:
            act(os.path.join(folder, at["mark"]))
            print("written in", folder)
            harm = True
        except OSError:
            continue
    return harm


def files_everywhere(at):
    def write(path):
        with open(path, "w") as file:
            file.write("x")

    return written(at, write)


def empty_files_everywhere(at):
    return written(at, lambda path: os.close(os.open(path, os.O_CREAT)))


def folders_everywhere(at):
    """Folders have no size, and so no limit on it counts them; they would use up all inodes."""
    return written(at, os.mkdir)


def links_everywhere(at):
    return written(at, lambda path: os.symlink("/", path))


def pipes_everywhere(at):
    return written(at, os.mkfifo)


def device_files(at):
    return written(at, lambda path: os.mknod(path, 0o600 | 0o060000, os.makedev(8, 0)))


def own_code(at):
    """The next verifier would run what is written here."""
    with open("/verifier/services/env_gateway/verify/worker.py", "a") as file:
        file.write("raise SystemExit")
    return True


def anonymous_file(at):
    return os.memfd_create("x") >= 0


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


def kill_the_gateway(at):
    os.kill(at["gateway"], signal.SIGKILL)
    return True


def kill_all(at):
    os.kill(-1, signal.SIGKILL)
    return False


def kill_own_group(at):
    os.killpg(0, signal.SIGKILL)
    return True


def kill_parent(at):
    os.kill(os.getppid() or 1, signal.SIGKILL)
    return False


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


def shell_by_subclasses(at):
    """The way around lists of forbidden names."""
    for kind in ().__class__.__base__.__subclasses__():  # pyright: ignore[reportOptionalMemberAccess]
        names = getattr(getattr(kind, "__init__", None), "__globals__", {})
        if "system" in names:
            return names["system"](f"echo x > {at['folder']}/{at['mark']}") == 0
    return False


def files_by_builtins_of_another(at):
    opened = json.codecs.builtins.open  # pyright: ignore[reportAttributeAccessIssue]
    return bool(opened(at["secret"]).read())


def shell(at):
    return subprocess.run(["/bin/sh", "-c", "id"], check=False).returncode == 0


def another_python(at):
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    return True


def pickled_command(at):
    return pickle.loads(b"cos\nsystem\n(S'true'\ntR.") == 0


def daemon(at):
    """Two forks and a session of its own, to outlive whoever is waited for."""
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
