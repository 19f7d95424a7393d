"""The system calls that a verifier may make. Pure data.

Each affects only the process itself, its pipes, and files that it only reads. Calls that act on a
file's inode beyond its content (locks, leases, watches, page cache) are excluded: the libraries are
the same inodes in all sandboxes, so such calls would be channels between them.
"""

import errno
from dataclasses import dataclass

X86_64, AARCH64 = "x86_64", "aarch64"
# Machine to its AUDIT_ARCH constant.
ARCHITECTURES = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}

# Name to the numbers on x86-64 and on aarch64; None if there is no such call.
_PLAIN: dict[str, tuple[int | None, int | None]] = {
    # Pipes, and reading files.
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "close_range": (436, 436),
    "pipe": (22, None),
    # Waiting.
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    # Its own memory.
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "brk": (12, 214),
    # Signals to itself.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "tgkill": (234, 131),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # Time, randomness and names.
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    # Start and end of a program. The first process of the sandbox waits for the others.
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "execve": (59, 221),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "exit": (60, 93),
    "exit_group": (231, 94),
}


@dataclass(frozen=True, slots=True)
class ArgumentCheckedCall:
    """A call that is allowed by one of its arguments: if its bits within `mask` equal one of
    `values`. Otherwise it fails with `error`, as on a kernel that does not know the value."""

    numbers: tuple[int | None, int | None]
    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    error: int = errno.EINVAL


_HUGE_PAGES = 0x40000
_CLOSE_ON_EXEC, _NON_BLOCKING = 0o2000000, 0o4000
_SET_FS = 0x1002
_FUTEX_PRIVATE, _FUTEX_REALTIME = 128, 256
_WAIT, _WAKE, _WAIT_BITSET, _WAKE_BITSET = 0, 1, 9, 10
_DUP, _GET_FD, _SET_FD, _GET_FLAGS, _SET_FLAGS, _DUP_CLOSE_ON_EXEC = 0, 1, 2, 3, 4, 1030
_IS_TERMINAL, _TO_READ, _BLOCKING, _INHERITED, _NOT_INHERITED = (
    0x5401,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)
_NOT_NEEDED, _FREE, _HUGE, _NOT_HUGE = 4, 8, 14, 15

_CHECKED = (
    # Huge pages are a pool of the whole machine.
    ArgumentCheckedCall(
        numbers=(9, 222), argument=3, mask=_HUGE_PAGES, values=(0,), error=errno.ENOMEM
    ),
    # Except advice that merges pages with equal ones of other processes.
    ArgumentCheckedCall(
        numbers=(28, 233), argument=2, values=(_NOT_NEEDED, _FREE, _HUGE, _NOT_HUGE)
    ),
    # A futex that is not private may lie in a library, where another sandbox waits for it.
    ArgumentCheckedCall(
        numbers=(202, 98),
        argument=1,
        mask=0xFFFFFFFF & ~_FUTEX_REALTIME,
        values=tuple(
            _FUTEX_PRIVATE | action for action in (_WAIT, _WAKE, _WAIT_BITSET, _WAKE_BITSET)
        ),
        error=errno.ENOSYS,
    ),
    # Neither locks and leases nor larger pipes.
    ArgumentCheckedCall(
        numbers=(72, 25),
        argument=1,
        values=(_DUP, _GET_FD, _SET_FD, _GET_FLAGS, _SET_FLAGS, _DUP_CLOSE_ON_EXEC),
        error=errno.EPERM,
    ),
    ArgumentCheckedCall(
        numbers=(16, 29),
        argument=1,
        values=(_IS_TERMINAL, _TO_READ, _BLOCKING, _INHERITED, _NOT_INHERITED),
        error=errno.ENOTTY,
    ),
    # Except the kernel's event notifications.
    ArgumentCheckedCall(
        numbers=(293, 59),
        argument=1,
        mask=0xFFFFFFFF & ~(_CLOSE_ON_EXEC | _NON_BLOCKING),
        values=(0,),
    ),
    # Its own limits.
    ArgumentCheckedCall(numbers=(302, 261), argument=0, values=(0,), error=errno.EPERM),
    # Address of thread-local variables.
    ArgumentCheckedCall(numbers=(158, None), argument=0, values=(_SET_FS,)),
)
# From this number on, the same on every machine, C libraries have fallbacks for missing calls: on
# ENOSYS they try an older one.
FIRST_YOUNGER_CALL = 424


def plain_calls(machine: str) -> list[int]:
    """Return the numbers of the calls that are allowed with any arguments."""
    return sorted(
        number
        for numbers in _PLAIN.values()
        if (number := _number_on(machine, numbers)) is not None
    )


def checked_calls(machine: str) -> list[tuple[int, ArgumentCheckedCall]]:
    """Return the calls that are allowed by an argument, with their numbers."""
    pairs = [(_number_on(machine, call.numbers), call) for call in _CHECKED]
    return [(number, call) for number, call in pairs if number is not None]


def _number_on(machine: str, numbers: tuple[int | None, int | None]) -> int | None:
    return numbers[0] if machine == X86_64 else numbers[1]
