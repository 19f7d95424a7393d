# pyright: basic
"""Programs that want to use up the machine, or that die of themselves. None may cost more than its
own process; those that return report whether they succeeded."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import socket
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"


def one_big_object(at):
    return len(bytearray(2**34)) > 0


def many_small_objects(at):
    kept = []
    while True:
        kept.append(bytearray(2**20))


def mapped_memory(at):
    kept = []
    for _ in range(16):
        kept.append(mmap.mmap(-1, 2**30))
    return True


def locked_memory(at):
    buffer = ctypes.create_string_buffer(2**26)
    return ctypes.CDLL(None).mlock(buffer, len(buffer)) == 0


def descriptors(at):
    kept = [os.dup(0) for _ in range(10_000)]
    return len(kept) > 64


def full_pipes(at):
    for _ in range(1000):
        _, end = os.pipe()
        os.set_blocking(end, False)
        os.write(end, b"x" * 2**16)
    return True


def signals_that_wait(at):
    signal.pthread_sigmask(signal.SIG_BLOCK, {40})
    call, me, waiting = 234 if X86 else 131, os.getpid(), 0
    while waiting < 1000 and LIBC.syscall(call, me, me, 40) == 0:
        waiting += 1
    return waiting > 64


def arguments_of_a_program(at):
    os.execv(sys.executable, [sys.executable, *["x" * 2**16] * 2**10])


def recursion(at):
    sys.setrecursionlimit(2**30)

    def deeper():
        # So that the memory ends soon.
        kept = bytes(2**12)
        return deeper() + len(kept)

    return deeper()


def nested_data(at):
    value = []
    for _ in range(10**6):
        value = [value]
    return repr(value)


def print_one_huge_line(at):
    print("x" * 2**26)
    return False


def raw_output_for_ever(at):
    while True:
        os.write(1, b"x" * 2**16)


def raw_errors_for_ever(at):
    while True:
        os.write(2, b"x" * 2**16)


def null_pointer(at):
    return ctypes.string_at(0)


def abort(at):
    os.abort()


def leave(at):
    os._exit(0)


def reached(limit, act):
    """Return True if `act` succeeds more often than `limit`."""
    done = 0
    try:
        while done <= limit:
            act()
            done += 1
    except OSError as error:
        print(error)
    return done > limit


def wide_pipes(at):
    """A mebibyte of the kernel's memory each, where 64 KiB are usual."""
    return reached(1, lambda: fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20))


def full_sockets(at):
    kept = []

    def fill():
        for end in socket.socketpair():
            kept.append(end)
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while end.send(b"x" * 2**12):
                    pass

    return reached(1, fill)


def events_of_the_machine(at):
    def take():
        if LIBC.syscall(206 if X86 else 0, 1024, ctypes.byref(ctypes.c_ulong())) != 0:
            raise OSError(ctypes.get_errno(), "no events")

    return reached(1, take)


def timers_of_the_kernel(at):
    def make():
        if LIBC.syscall(222 if X86 else 107, 1, None, ctypes.byref(ctypes.c_int())) != 0:
            raise OSError(ctypes.get_errno(), "no timer")

    return reached(64, make)


def anonymous_files(at):
    return reached(1, lambda: os.memfd_create("x"))


def memory_of_many_maps(at):
    kept = []
    for _ in range(2**20):
        kept.append(mmap.mmap(-1, 2**14, prot=mmap.PROT_READ))
    return len(kept) > 2**15


def memory_that_is_grown(at):
    """Allocate memory again and again, and never free it."""
    memory = mmap.mmap(-1, 2**20)
    while True:
        memory.resize(2 * len(memory))


def rows_of_sqlite(at):
    import sqlite3

    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE t AS {numbers} SELECT zeroblob(1000000) FROM n")
    return True


def deep_parse(at):
    return eval("(" * 10**5 + ")" * 10**5)


def deep_destruction(at):
    kept = None
    for _ in range(10**6):
        kept = (kept,)
    del kept
    return False
