"""Stop signals: the first, the same press again, and a later one."""

import asyncio
import os
import signal
import threading
import time

import pytest

from flotilla_common.process.stop_signals import STOP_SIGNALS, StopSignals, remove_from_loop


class Heard:
    """The signals that the handler received."""

    def __init__(self, same_s: float = 0.0) -> None:
        self.first: list[int] = []
        self.later: list[int] = []
        self.signals = StopSignals(self.first.append, self.later.append, same_s=same_s)


def test_the_first_signal_is_distinguished_from_later_ones() -> None:
    heard = Heard()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        heard.signals.note_signal(number)
    assert heard.first == [signal.SIGTERM]
    assert heard.later == [signal.SIGINT, signal.SIGTERM]


def test_one_press_that_arrives_twice_is_one_request() -> None:
    heard = Heard(same_s=0.05)
    heard.signals.note_signal()
    heard.signals.note_signal()
    assert (heard.first, heard.later) == ([signal.SIGINT], [])
    time.sleep(0.06)
    heard.signals.note_signal()
    assert (heard.first, heard.later) == ([signal.SIGINT], [signal.SIGINT])


async def test_in_the_loop_they_are_handled_between_callbacks() -> None:
    first, later = asyncio.Event(), asyncio.Event()
    signals = StopSignals(lambda _number: first.set(), lambda _number: later.set())
    signals.handle_in_loop()
    try:
        for heard, number in ((first, signal.SIGTERM), (later, signal.SIGINT)):
            os.kill(os.getpid(), number)
            assert not heard.is_set()
            async with asyncio.timeout(60.0):
                await heard.wait()
    finally:
        remove_from_loop(STOP_SIGNALS)


@pytest.fixture
def restored_handlers():
    """Put the handlers back that were there."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
async def test_at_once_they_are_handled_while_the_loop_is_blocked() -> None:
    heard = Heard()
    heard.signals.handle_at_once()
    killer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    end = time.monotonic() + 5.0
    while not heard.first and time.monotonic() < end:
        time.sleep(0.001)  # noqa: ASYNC251 (it is to block)
    killer.join()
    assert heard.first == [signal.SIGINT]
