"""The filter of system calls, as a kernel would apply it."""

import errno
import struct
from collections.abc import Sequence

import pytest

from flotilla_env_gateway.verify import allowed_syscalls, seccomp

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
MACHINES = [pytest.param("x86_64", X86_64), pytest.param("aarch64", AARCH64)]
# read, write, close, mmap, execve, wait4, exit, exit_group, openat, getrandom, clock_nanosleep.
NEEDED = {
    X86_64: (0, 1, 3, 59, 61, 60, 231, 257, 318, 230),
    AARCH64: (63, 64, 57, 221, 260, 93, 94, 56, 278, 115),
}
# clone, kill, ptrace, mount, socket, socketpair, bpf, flock, io_setup, io_submit, inotify_init1,
# prctl, seccomp, memfd_create, timer_create, epoll_create1, eventfd2, splice, setsockopt, sysinfo,
# mincore, fadvise64, preadv2.
DENIED = {
    X86_64: (
        *(56, 57, 58, 62, 101, 165, 41, 53, 321, 73, 206, 209, 253, 294, 157, 317, 319),
        *(222, 291, 290, 275, 54, 99, 27, 221, 327),
    ),
    AARCH64: (
        *(220, 129, 117, 40, 198, 199, 280, 32, 0, 2, 26, 167, 277, 279),
        *(107, 20, 19, 76, 208, 179, 232, 223, 286),
    ),
}
MMAP, MADVISE, FUTEX, FCNTL, IOCTL, PIPE, LIMIT = range(7)
CHECKED = {X86_64: (9, 28, 202, 72, 16, 293, 302), AARCH64: (222, 233, 98, 25, 29, 59, 261)}


def verdict(
    machine: str, number: int, architecture: int | None = None, arguments: Sequence[int] = ()
) -> int:
    """Return a kernel's verdict: classic BPF, as far as the filter uses it."""
    program = seccomp.build_program(machine)
    assert program is not None
    lines = list(struct.iter_unpack("=HBBI", program))
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack(
        "<IIQ6Q", number, architecture or allowed_syscalls.ARCHITECTURES[machine], 0, *values
    )
    value, at = 0, 0
    while True:
        code, if_so, if_not, operand = lines[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:
            value &= operand
        else:
            assert code in (0x15, 0x35)
            at += if_so if (value == operand if code == 0x15 else value >= operand) else if_not


def denied(error: int) -> int:
    return 0x50000 | error


@pytest.mark.parametrize(("machine", "architecture"), MACHINES)
def test_what_a_program_needs_is_allowed_and_what_leads_out_is_not(
    machine: str, architecture: int
) -> None:
    for number in NEEDED[architecture]:
        assert verdict(machine, number) == ALLOWED, number
    for number in DENIED[architecture]:
        assert verdict(machine, number) == denied(errno.EPERM), number


@pytest.mark.parametrize(("machine", "architecture"), MACHINES)
def test_only_what_is_listed_is_allowed(machine: str, architecture: int) -> None:
    checked = [number for number, _ in allowed_syscalls.checked_calls(machine)]
    allowed = {number for number in range(2048) if verdict(machine, number) == ALLOWED}
    # Some are allowed with the argument 0.
    assert (
        set(allowed_syscalls.plain_calls(machine))
        <= allowed
        <= {*allowed_syscalls.plain_calls(machine), *checked}
    )
    assert len(allowed) < 110


@pytest.mark.parametrize(("machine", "architecture"), MACHINES)
def test_the_c_library_is_shown_no_call_for_which_it_knows_an_older_one(
    machine: str, architecture: int
) -> None:
    clone3, openat2, close_range, faccessat2, unknown = 435, 437, 436, 439, 700
    for number in (clone3, openat2, unknown):
        assert verdict(machine, number) == denied(errno.ENOSYS)
    for number in (close_range, faccessat2):
        assert verdict(machine, number) == ALLOWED


@pytest.mark.parametrize(("machine", "architecture"), MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        pytest.param(MMAP, (0, 4096, 3, 0x22), ALLOWED, id="private memory"),
        pytest.param(MMAP, (0, 4096, 3, 0x40022), denied(errno.ENOMEM), id="huge pages"),
        pytest.param(MADVISE, (0, 4096, 4), ALLOWED, id="give back"),
        pytest.param(MADVISE, (0, 4096, 12), denied(errno.EINVAL), id="merge with others"),
        pytest.param(FUTEX, (0, 128), ALLOWED, id="private wait"),
        pytest.param(FUTEX, (0, 128 | 256 | 9), ALLOWED, id="private wait by the clock"),
        pytest.param(FUTEX, (0, 0), denied(errno.ENOSYS), id="shared wait"),
        pytest.param(FUTEX, (0, 1), denied(errno.ENOSYS), id="shared wake"),
        pytest.param(FUTEX, (0, 128 | 6), denied(errno.ENOSYS), id="priority inheritance"),
        pytest.param(FCNTL, (0, 3), ALLOWED, id="flags"),
        pytest.param(FCNTL, (0, 1030), ALLOWED, id="duplicate"),
        *[
            pytest.param(FCNTL, (0, command), denied(errno.EPERM), id=name)
            for command, name in {
                **{5: "look for a lock", 6: "lock", 7: "lock and wait", 8: "owner", 10: "signal"},
                **{
                    36: "look for a file's lock",
                    37: "file's lock",
                    1024: "lease",
                    1025: "is leased",
                },
                **{1026: "notify", 1031: "pipe size", 1033: "seals"},
            }.items()
        ],
        pytest.param(IOCTL, (0, 0x5401), ALLOWED, id="is a terminal"),
        pytest.param(IOCTL, (0, 0x5412), denied(errno.ENOTTY), id="terminal input"),
        pytest.param(IOCTL, (0, 0x80086601), denied(errno.ENOTTY), id="file flags"),
        pytest.param(PIPE, (0, 0o2004000), ALLOWED, id="pipe"),
        pytest.param(PIPE, (0, 0x80), denied(errno.EINVAL), id="pipe of notices"),
        pytest.param(LIMIT, (0, 9), ALLOWED, id="own limits"),
        pytest.param(LIMIT, (1, 9), denied(errno.EPERM), id="limits of another"),
    ],
)
def test_arguments_decide_where_the_call_alone_does_not(
    machine: str, architecture: int, call: int, arguments: Sequence[int], expected: int
) -> None:
    assert verdict(machine, CHECKED[architecture][call], arguments=arguments) == expected
    # Of what is an int to the kernel, the upper half does not count: it must not help here either.
    above = [value | 1 << 32 for value in arguments]
    assert verdict(machine, CHECKED[architecture][call], arguments=above) == expected


def test_of_the_options_of_a_thread_it_may_set_where_its_variables_are() -> None:
    arch_prctl, set_fs, set_gs, no_cpuid = 158, 0x1002, 0x1001, 0x1012
    assert verdict("x86_64", arch_prctl, arguments=(set_fs,)) == ALLOWED
    for option in (set_gs, no_cpuid):
        assert verdict("x86_64", arch_prctl, arguments=(option,)) == denied(errno.EINVAL)


def test_only_the_numbers_of_its_own_architecture_count() -> None:
    read_by_x32 = 0x40000000
    assert verdict("x86_64", read_by_x32) == denied(errno.EPERM)
    assert verdict("x86_64", 0, 0x40000003) == KILLED
    assert verdict("aarch64", 63, X86_64) == KILLED


def test_on_an_unknown_machine_there_is_no_filter() -> None:
    assert seccomp.build_program("pdp11") is None
