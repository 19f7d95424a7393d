"""A seccomp filter for verifiers, which allows only the calls of `allowed_syscalls.py`. Classic
BPF, written out here so that the gateway needs no library for it."""

import errno
import platform
import struct

from flotilla_env_gateway.verify import allowed_syscalls
from flotilla_env_gateway.verify.allowed_syscalls import ArgumentCheckedCall

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
# Offsets in struct seccomp_data; of an argument only the lower half, which holds an int.
_NUMBER, _ARCHITECTURE, _ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8
# Numbers from here on belong to the x32 ABI, which would bypass the list.
_X32 = 0x40000000


def build_program(machine: str | None = None) -> bytes | None:
    """Build the filter as an array of struct sock_filter; None for an unknown machine.

    A forbidden call fails with EPERM, or with ENOSYS if the C library then tries an older
    call: clone3, after which it tries clone, which fails."""
    machine = machine or platform.machine()
    architecture = allowed_syscalls.ARCHITECTURES.get(machine)
    if architecture is None:
        return None
    lines = [
        _bpf_instruction(_LOAD, _ARCHITECTURE),
        _bpf_instruction(_EQUAL, architecture, jt=1),
        _bpf_instruction(_RETURN, _KILL),
        _bpf_instruction(_LOAD, _NUMBER),
        _bpf_instruction(_AT_LEAST, _X32, jf=1),
        _bpf_instruction(_RETURN, _ERRNO | errno.EPERM),
    ]
    for number, call in allowed_syscalls.checked_calls(machine):
        lines += _for_one_call(number, _check_argument(call))
    for number in allowed_syscalls.plain_calls(machine):
        lines += _for_one_call(number, [_bpf_instruction(_RETURN, _ALLOW)])
    lines += [
        _bpf_instruction(_AT_LEAST, allowed_syscalls.FIRST_YOUNGER_CALL, jf=1),
        _bpf_instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _bpf_instruction(_RETURN, _ERRNO | errno.EPERM),
    ]
    return b"".join(lines)


def _for_one_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Return the lines that decide about one call."""
    return [_bpf_instruction(_EQUAL, number, jf=len(lines)), *lines]


def _check_argument(call: ArgumentCheckedCall) -> list[bytes]:
    count = len(call.values)
    return [
        _bpf_instruction(_LOAD, _ARGUMENTS + _ARGUMENT_BYTES * call.argument),
        _bpf_instruction(_AND, call.mask),
        *(_bpf_instruction(_EQUAL, value, jt=count - i) for i, value in enumerate(call.values)),
        _bpf_instruction(_RETURN, _ERRNO | call.error),
        _bpf_instruction(_RETURN, _ALLOW),
    ]


def _bpf_instruction(code: int, value: int, *, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, value)
