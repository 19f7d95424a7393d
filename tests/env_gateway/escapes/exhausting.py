# pyright: basic
"""Programs that want to use up the machine or never end. None of them may cost more than its own
process; those that come back say whether they got what they wanted."""

import ctypes
import itertools
import mmap
import os
import signal
import sys
import threading
import time


def fork_bomb(at):
    while True:
        try:
            os.fork()
        except OSError as error:
            print(error)
            return False


def fork_bomb_that_never_gives_up(at):
    while True:
        try:
            os.fork()
        except BaseException:  # noqa: BLE001
            continue


def thread_bomb(at):
    threading.stack_size(2**16)
    for _ in range(100_000):
        threading.Thread(target=time.sleep, args=(600,)).start()
    return True


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


def spin(at):
    while True:
        at = at


def sleep(at):
    time.sleep(3600)


def swallow_everything(at):
    while True:
        try:
            while True:
                at = at
        except BaseException:  # noqa: BLE001
            continue


def ignore_signals(at):
    for number in range(1, 64):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    while True:
        at = at


def print_for_ever(at):
    while True:
        print("x" * 2**16)


def print_one_huge_line(at):
    print("x" * 2**26)
    return False


def raw_output_for_ever(at):
    while True:
        os.write(1, b"x" * 2**16)


def raw_errors_for_ever(at):
    while True:
        os.write(2, b"x" * 2**16)


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


def null_pointer(at):
    return ctypes.string_at(0)


def abort(at):
    os.abort()


def leave(at):
    os._exit(0)


def huge_number(at):
    sys.set_int_max_str_digits(0)
    print(len(str(10 ** (10**7))))
    return False


def regular_expression(at):
    import re

    return re.match(r"(a+)+$", "a" * 40 + "b")


def endless_iterator(at):
    return sum(itertools.count())


def timers(at):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    while True:
        at = at
