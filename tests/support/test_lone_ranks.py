"""Reports of ranks without a service, and the end of those that send none."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import pytest

from tests.support.lone_ranks import collect_reports

FORKED = multiprocessing.get_context("fork")


def report_pid(pipe: Connection) -> None:
    pipe.send(os.getpid())


def end_without_a_word(pipe: Connection) -> None:
    os._exit(0)


def wait_for_the_others(pipe: Connection) -> None:
    time.sleep(100.0)


def fork_ranks(
    *ranks: Callable[[Connection], None],
) -> tuple[list[ForkProcess], list[tuple[Connection, Connection]]]:
    """Return a process for each rank, not yet started, and its pipe."""
    pipes = [FORKED.Pipe(duplex=False) for _ in ranks]
    return [
        FORKED.Process(target=rank, args=(there,))
        for rank, (_, there) in zip(ranks, pipes, strict=True)
    ], pipes


def test_the_reports_come_in_the_order_of_the_ranks() -> None:
    processes, pipes = fork_ranks(report_pid, report_pid, report_pid)
    assert collect_reports(processes, pipes) == [process.pid for process in processes]


def test_a_forked_rank_that_ends_without_a_report_ends_the_others() -> None:
    processes, pipes = fork_ranks(wait_for_the_others, end_without_a_word, wait_for_the_others)
    with pytest.raises(EOFError, match="rank 1 ended without a report"):
        collect_reports(processes, pipes)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, -signal.SIGKILL]
