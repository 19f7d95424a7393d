"""Signals of the test process, and what its children inherit of them."""

import signal
from types import FrameType


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, which children do not inherit."""


def pytest_configure() -> None:
    """Have children start with the signals of a terminal, under `nohup` or `&` too.

    What is ignored there stays ignored in children, and tests interrupt some of theirs.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)
