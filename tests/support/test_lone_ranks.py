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


class ForkedRanks:
    """Processes that run one function each."""

    def __init__(self, *ranks: Callable[[Connection], None]) -> None:
        self._ranks = ranks
        self.processes: list[ForkProcess] = []

    def collect(self) -> list[int]:
        return collect_reports(len(self._ranks), self._make)

    def _make(self, index: int, pipe: Connection) -> ForkProcess:
        self.processes.append(FORKED.Process(target=self._ranks[index], args=(pipe,)))
        return self.processes[-1]


def test_the_reports_come_in_the_order_of_the_ranks() -> None:
    ranks = ForkedRanks(report_pid, report_pid, report_pid)
    assert ranks.collect() == [process.pid for process in ranks.processes]


def test_a_forked_rank_that_ends_without_a_report_ends_the_others() -> None:
    ranks = ForkedRanks(wait_for_the_others, end_without_a_word, wait_for_the_others)
    with pytest.raises(EOFError, match="rank 1 ended without a report"):
        ranks.collect()
    ends = [process.exitcode for process in ranks.processes]
    assert ends == [-signal.SIGKILL, 0, -signal.SIGKILL]
