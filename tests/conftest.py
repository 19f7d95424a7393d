"""Signals and logs of the test process, what its children inherit of them, and shared fixtures."""

import signal
from types import FrameType

import structlog

pytest_plugins = ["tests.support.shared_folders", "tests.support.models"]


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, which children do not inherit."""


def pytest_configure() -> None:
    _restore_signals()
    _plain_tracebacks()


def _plain_tracebacks() -> None:
    """Log errors without the drawings of `rich`: one with its locals takes seconds, which hold up
    the event loop that is tested."""
    *first, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*first, renderer])


def _restore_signals() -> None:
    """Have children start with the signals of a terminal, under `nohup` or `&` too.

    What is ignored there stays ignored in children, and tests interrupt some of theirs.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)
