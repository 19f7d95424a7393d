# pyright: basic
"""Programs that try to signal to a verifier beside them, or to learn what others do, through
what the kernel keeps for all: the inodes of libraries, memory, the scheduler."""

import ctypes
import errno
import fcntl
import mmap
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
X86 = os.uname().machine == "x86_64"
FUTEX = 202 if X86 else 98
LOCK = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
# A file that every sandbox has.
LIBRARY = os.open(os.__file__, os.O_RDONLY)


def mapped():
    address = LIBC.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, LIBRARY, 0)
    return ctypes.c_void_p(address)


def lock_of_a_library(at):
    fcntl.flock(LIBRARY, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def shared_lock_of_a_library(at):
    fcntl.flock(LIBRARY, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return True


def lock_of_bytes(at):
    fcntl.lockf(LIBRARY, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return True


def lock_of_an_open_file(at):
    return bool(fcntl.fcntl(LIBRARY, 37, LOCK))


def look_for_a_lock(at):
    return any(fcntl.fcntl(LIBRARY, command, LOCK) for command in (fcntl.F_GETLK, 36))


def lease(at):
    """A process that opens a leased file for writing waits for its holder."""
    fcntl.fcntl(LIBRARY, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return True


def look_for_a_lease(at):
    return fcntl.fcntl(LIBRARY, fcntl.F_GETLEASE) >= 0


def notified_of_a_folder(at):
    folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
    fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS)
    return True


def notified_of_files(at):
    """Opened by any process: the gateway's own imports among them."""
    return (
        LIBC.inotify_add_watch(LIBC.inotify_init1(0), os.path.dirname(os.__file__).encode(), 0xFFF)
        >= 0
    )


def instances_of_inotify(at):
    return LIBC.inotify_init() >= 0


def notified_of_a_file_system(at):
    return LIBC.fanotify_init(0, 0) >= 0


def ring_in_a_library(at):
    """Wake all processes that wait at the same place of the same file."""
    return LIBC.syscall(FUTEX, mapped(), 1, 1, None, None, 0) >= 0


def listen_in_a_library(at):
    value = ctypes.cast(mapped(), ctypes.POINTER(ctypes.c_int)).contents
    soon = (ctypes.c_long * 2)(0, 1000)
    LIBC.syscall(FUTEX, mapped(), 0, value.value, soon, None, 0)
    return ctypes.get_errno() == errno.ETIMEDOUT


def time_of_the_last_access(at):
    """Others would see that this one reads a file."""
    before = os.fstat(LIBRARY).st_atime_ns
    os.pread(LIBRARY, 16, 0)
    os.listdir(os.path.dirname(os.__file__))
    return os.fstat(LIBRARY).st_atime_ns != before


def robust_futex_in_a_library(at):
    """The kernel wakes it when this process ends, but only if it can write there."""
    return LIBC.mprotect(mapped(), 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def pages_in_memory(at):
    return LIBC.mincore(mapped(), 4096, ctypes.create_string_buffer(1)) == 0


def pages_in_the_cache(at):
    span, found = (ctypes.c_uint64 * 2)(0, 4096), (ctypes.c_uint64 * 5)()
    return LIBC.syscall(451, LIBRARY, span, found, 0) == 0


def read_only_what_is_cached(at):
    return os.preadv(LIBRARY, [bytearray(16)], 0, os.RWF_NOWAIT) >= 0


def out_of_the_cache(at):
    os.posix_fadvise(LIBRARY, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def merged_pages(at):
    """Writing to a page that was merged with another's takes longer."""
    memory = mmap.mmap(-1, 2**20)
    memory.madvise(12)
    return True


def merged_pages_of_all(at):
    return LIBC.prctl(67, 1, 0, 0, 0) == 0


def shared_memory(at):
    return LIBC.shmget(7, 4096, 0o1666) >= 0


def semaphores(at):
    return LIBC.semget(7, 1, 0o1666) >= 0


def queues(at):
    return LIBC.msgget(7, 0o1666) >= 0


def named_queue(at):
    return LIBC.mq_open(b"/flotilla", os.O_CREAT | os.O_RDWR, 0o666, None) >= 0


def key_ring(at):
    add, keys = (248, -4) if X86 else (217, -4)
    return LIBC.syscall(add, b"user", b"mark", b"x", 1, keys) >= 0


def load_of_the_machine(at):
    """Its free memory is shared, too, and can carry signals between processes."""
    return bool(os.getloadavg())


def memory_of_the_machine(at):
    return LIBC.sysinfo(ctypes.create_string_buffer(256)) == 0


def free_space(at):
    return os.statvfs("/usr").f_blocks >= 0


def another_core(at):
    os.sched_setaffinity(0, {0})
    return True


def another_priority(at):
    os.nice(1)
    return True


def priority_of_disks(at):
    return LIBC.syscall(251 if X86 else 30, 1, 0, 3 << 13) == 0


def scheduler(at):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return True


def clock_corrections(at):
    return LIBC.adjtimex(ctypes.create_string_buffer(512)) >= 0


def counters(at):
    attributes = (ctypes.c_uint32 * 32)(1, 128, 1)
    return LIBC.syscall(298 if X86 else 241, attributes, 0, -1, -1, 0) >= 0
