"""Meetings of two processes: a side learns that the other is lost, or stands still."""

import threading
import time
from collections.abc import Iterator

import pytest

from flotilla_common.tensors.local_meeting import LocalConnection, LocalMeeting, meet

SHORT_S = 0.2
LONG_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[LocalConnection, LocalConnection]]:
    meeting = LocalMeeting()
    here = meet(meeting.name, SHORT_S)
    there = meeting.accept(LONG_S)
    meeting.close()
    yield here, there
    here.close()
    there.close()


def test_each_side_hears_as_many_ticks_as_the_other_gives(
    pair: tuple[LocalConnection, LocalConnection],
) -> None:
    here, there = pair
    there.tick()
    there.tick()
    here.wait_for_tick()
    here.wait_for_tick()
    with pytest.raises(RuntimeError, match="timed out"):
        here.wait_for_tick()


def test_a_side_that_has_ended_is_noticed_before_any_deadline(
    pair: tuple[LocalConnection, LocalConnection],
) -> None:
    here, there = pair
    threading.Timer(SHORT_S, here.close).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="it has ended"):
        there.wait_for_tick()
    assert time.monotonic() - began < LONG_S / 2
    with pytest.raises(RuntimeError, match="is lost"):
        there.tick()


def test_a_missing_side_is_waited_for_no_longer_than_the_deadline() -> None:
    meeting = LocalMeeting()
    with pytest.raises(RuntimeError, match="has not connected: timed out"):
        meeting.accept(SHORT_S)
    meeting.close()
    with pytest.raises(RuntimeError, match="no process waits at flotilla-"):
        meet(meeting.name, SHORT_S)
