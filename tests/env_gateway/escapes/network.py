# pyright: basic
"""Programs that try to reach a peer. Each reports whether it got as far as a socket."""

import array
import ctypes
import os
import socket

LIBC = ctypes.CDLL(None, use_errno=True)


def tcp(at):
    socket.create_connection(("127.0.0.1", at["tcp"]), timeout=1).sendall(b"secret")
    return True


def tcp_by_the_systems_own_call(at):
    """Around Python's socket module; 41 on x86-64, 198 on arm64."""
    return LIBC.syscall(41 if os.uname().machine == "x86_64" else 198, 2, 1, 0) >= 0


def udp(at):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", at["udp"]))
    return True


def unix_socket(at):
    socket.socket(socket.AF_UNIX).connect(at["unix"])
    return True


def abstract_socket(at):
    socket.socket(socket.AF_UNIX).connect("\0" + at["abstract"])
    return True


def name_service(at):
    return bool(socket.getaddrinfo("example.com", 80))


def virtual_machine_socket(at):
    """No network namespace covers these: they reach the host of a virtual machine."""
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    return True


def netlink(at):
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    return True


def raw_packets(at):
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    return True


def pair_of_sockets(at):
    """The buffers of a pair are the kernel's, and no limit of the process counts them."""
    return bool(socket.socketpair())


def pair_of_datagram_sockets(at):
    return bool(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))


def sockets_in_flight(at):
    """Sockets that wait in sockets count as no process's descriptors."""
    one, other = socket.socketpair()
    for _ in range(1000):
        fresh = socket.socketpair()
        for end in fresh:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            end.setblocking(False)
            end.send(b"x" * 2**17)
        numbers = array.array("i", [end.fileno() for end in fresh])
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    return bool(other)


def filter_of_a_socket(at):
    """Classic BPF of the verifier's own, in the kernel: one instruction, which keeps all."""
    line = (ctypes.c_uint16 * 4)(0x06, 0, 0xFFFF, 0)

    class SocketFilter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_void_p)]

    program = SocketFilter(1, ctypes.addressof(line))
    return socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 26, bytes(program)) is None


def every_family(at):
    numbers = (41, 53) if os.uname().machine == "x86_64" else (198, 199)
    buffer = (ctypes.c_int * 2)()
    return any(
        LIBC.syscall(number, family, kind, 0, buffer) >= 0
        for number in numbers
        for family in range(1, 46)
        for kind in (1, 2, 3, 5)
    )
