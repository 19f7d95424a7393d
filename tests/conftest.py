"""Signals and logs of the test process, what its children inherit of them, and shared fixtures."""

import gc
import signal
import sys
import warnings
from collections.abc import Generator
from importlib.util import find_spec
from types import FrameType
from typing import Any

import pytest
import structlog

from flotilla_common.weights.network_interfaces import INTERFACE_VARIABLES

pytest_plugins = [
    "tests.support.shared_folders",
    "tests.support.models",
    "tests.support.rank_forge",
]
if find_spec("hypothesis") is not None:  # SkyPilot's environment has none.
    from tests.support.examples import register_profiles

    register_profiles()


@pytest.fixture(autouse=True)
def _environment_of_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines switch torch's compiler off for their process, and ranks that meet in it choose its
    network interface."""
    for name in ("TORCHDYNAMO_DISABLE", *INTERFACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def _collect_leftovers(request: pytest.FixtureRequest) -> Generator[None]:
    """Collect what a module's tests leave unclosed: found later, it would fail a bystander.

    What vLLM leaves behind in a module of engine tests is collected without its warnings."""
    yield
    tested: list[Any] = [request.module, *vars(request.module).values()]
    with warnings.catch_warnings():
        if any(_is_engine_test(each) for each in tested):
            warnings.simplefilter("ignore")
        gc.collect()
    # Imports and shared fixtures: each later collection would visit them again.
    gc.freeze()


def _is_engine_test(tested: Any) -> bool:
    """True for a module or a function with the mark `engine`."""
    marked = getattr(tested, "pytestmark", ())
    marks: list[Any] = marked if isinstance(marked, list) else [marked]
    return any(getattr(mark, "name", "") == "engine" for mark in marks)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Drop what the traceback of a failed test keeps open, without its warnings: found later, it
    would fail a bystander."""
    done = yield
    if item.stash.get(_FAILED, False):
        sys.last_traceback = sys.last_value = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    return done


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, which children do not inherit."""


def pytest_collection_finish() -> None:
    """Keep thousands of tests and what they import out of garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    # Collections while all tests are imported find nothing, and take a sixth of that time.
    gc.disable()
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
