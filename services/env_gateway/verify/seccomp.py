"""A seccomp filter for verifiers: no other process or thread, no sockets, no way deeper into the
kernel. Classic BPF, written out here so that the gateway needs no library for it."""

import errno
import platform
import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE = 0, 4
# From here on numbers are those of the x32 ABI, which the filter would otherwise not know.
_X32 = 0x40000000
_CLONE3 = 435
# The same on every architecture.
_SHARED = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
_X86_64 = {
    "shmget": 29,
    "socket": 41,
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "syslog": 103,
    "personality": 135,
    "modify_ldt": 154,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "reboot": 169,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
}
_AARCH64 = {
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "chroot": 51,
    "quotactl": 60,
    "acct": 89,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "syslog": 116,
    "ptrace": 117,
    "reboot": 142,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "swapon": 224,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
    "kexec_file_load": 294,
}
# Machine to its AUDIT_ARCH constant and its numbers.
_MACHINES: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}


def program(machine: str | None = None) -> bytes | None:
    """The filter as an array of struct sock_filter, or None for an unknown machine.

    What it forbids fails with EPERM, and clone3 with ENOSYS, after which the C library tries clone.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, numbers = known
    denied = sorted({*numbers.values(), *_SHARED.values()})
    # Behind the checks: allow, deny, say that there is no such call.
    checks = [(_EQUAL, number, i) for i, number in enumerate(denied)]
    to_deny = len(denied) + 2
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, architecture, jt=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, jt=to_deny),
        _line(_EQUAL, _CLONE3, jt=to_deny),
        *(_line(code, number, jt=len(denied) - i) for code, number, i in checks),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _ERRNO | errno.EPERM),
        _line(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, jt: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, 0, value)
