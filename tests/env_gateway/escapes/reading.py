# pyright: basic
"""Programs that want to read or reach what is not theirs; each tells whether it did."""

import ctypes
import glob
import os
import socket
import sqlite3
import sys

LIBC = ctypes.CDLL(None, use_errno=True)


def readable(*paths):
    """Says what it could read, so that the test finds it in what was printed."""
    found = False
    for path in paths:
        try:
            with open(path, "rb") as file:
                print(path, file.read(4096))
            found = True
        except OSError as error:
            print(path, error)
    return found


def environment(at):
    print(dict(os.environ))
    return bool(os.environ.keys() - {"LC_CTYPE", "PWD"})


def environment_in_c(at):
    getenv = LIBC.getenv
    getenv.restype = ctypes.c_char_p
    print(getenv(at["variable"].encode()))
    return getenv(at["variable"].encode()) is not None


def own_proc(at):
    return readable("/proc/self/environ", "/proc/self/maps", "/proc/self/mountinfo")


def first_process(at):
    return readable("/proc/1/environ", "/proc/1/cmdline", "/proc/1/root/etc/passwd")


def parent(at):
    return readable(f"/proc/{os.getppid()}/environ", f"/proc/{at['gateway']}/environ")


def every_process(at):
    return readable(*glob.glob("/proc/*/environ"), *glob.glob("/proc/[0-9]*/cmdline"))


def accounts(at):
    return readable("/etc/shadow", "/etc/passwd", "/etc/hosts", "/etc/machine-id")


def secret_file(at):
    return readable(at["secret"])


def secret_by_symlink(at):
    for folder in ("/tmp", "/", "/dev/shm", "/verifier"):
        link = os.path.join(folder, "link")
        try:
            os.symlink(at["secret"], link)
        except OSError:
            continue
        return readable(link)
    return False


def secret_through_inherited_descriptors(at):
    """A directory that was left open would lead out of any file system."""
    for descriptor in range(3, 64):
        try:
            os.open("../../../../../../etc/passwd", os.O_RDONLY, dir_fd=descriptor)
        except OSError:
            continue
        return True
    return False


def repository(at):
    return readable(at["repository"] + "/pyproject.toml", "/verifier/pyproject.toml")


def repository_by_import(at):
    from services.common import log

    return log is not None


def packages_by_import(at):
    import grpc

    return grpc is not None


def homes(at):
    for folder in ("/home", "/work", "/opt", "/srv", "/run", "/var", "/boot", "/sys", "/mnt"):
        if os.path.exists(folder):
            print(folder, os.listdir(folder))
            return True
    return readable("/root/.bashrc", "/root/.profile", "/root/.ssh/id_rsa", "/root/.netrc")


def devices(at):
    return readable("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/null")


def files_through_sqlite(at):
    database = sqlite3.connect(":memory:")
    database.execute("ATTACH DATABASE ? AS other", (at["database"],))
    print(database.execute("SELECT * FROM other.secrets").fetchall())
    return True


def extension_through_sqlite(at):
    database = sqlite3.connect(":memory:")
    database.enable_load_extension(True)
    database.load_extension("/lib/x86_64-linux-gnu/libc.so.6")
    return True


def kernel_log(at):
    buffer = ctypes.create_string_buffer(4096)
    return LIBC.klogctl(3, buffer, 4096) >= 0


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


def gateway_by_frames(at):
    """What called the verifier knows no more than the verifier."""
    frame = sys._getframe()
    while frame is not None:
        if at["canary"] in repr(frame.f_globals):
            return True
        frame = frame.f_back
    return False
