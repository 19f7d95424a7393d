# pyright: basic
"""Programs that never end, and do not want to be ended."""

import atexit
import itertools
import os
import select
import signal
import sqlite3
import sys
import threading
import time


def fork_bomb_that_never_gives_up(at):
    while True:
        try:
            os.fork()
        except BaseException:  # noqa: BLE001
            continue


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


def swallow_the_request_to_end(at):
    def stay(*_):
        time.sleep(3600)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, stay)
    atexit.register(stay)
    stay()


def block_all_signals(at):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        at = at


def wait_for_a_signal(at):
    signal.sigwait({signal.SIGUSR1})


def wait_for_nothing(at):
    select.select([], [], [])


def wait_in_a_poll(at):
    poll = select.poll()
    poll.register(os.pipe()[0], select.POLLIN)
    poll.poll()


def wait_for_itself(at):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_the_gateway(at):
    """The gateway sends only answers to requests."""
    for descriptor in range(3, 64):
        try:
            os.read(descriptor, 1)
        except OSError:
            continue


def another_program_in_its_place(at):
    """Its arguments end as the worker's do, for the test to find it."""
    os.execv(sys.executable, [sys.executable, "-c", "while True: pass", *sys.argv[2:]])


def statement_without_end(at):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    return sqlite3.connect(":memory:").execute(f"{numbers} SELECT max(i) FROM n").fetchall()


def statement_of_the_environment(at):
    env = sys._getframe(1).f_locals["env"]
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    return env.db().select(f"{numbers} SELECT max(i) FROM n")


def end_that_does_not_end(at):
    class LastingEnd:
        def __del__(self):
            while True:
                pass

    LastingEnd()


def error_that_does_not_end(at):
    class LastingError(Exception):
        def __str__(self):
            while True:
                pass

    sys.stdout.write(str(LastingError()))


def comparison_that_does_not_end(at):
    return 10**9 in itertools.cycle([0])


def import_that_does_not_end(at):
    class Finder:
        def find_spec(self, *_):
            while True:
                pass

    sys.meta_path.insert(0, Finder())
    import email.mime.text as text

    return text


def alarm_without_end(at):
    """It sleeps on after every wake-up, its own above all."""
    signal.signal(signal.SIGALRM, lambda *_: signal.alarm(1))
    signal.alarm(1)
    while True:
        signal.pause()


def reader_of_its_own_pipe(at):
    reader, writer = os.pipe()
    while True:
        os.write(writer, b"x")
        os.read(reader, 1)


def one_call_into_c(at):
    return sum(range(10**18))
