"""Tasks and calls for harnesses that serve the apps of `environments/`."""

import os
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from tests.env_gateway.backends.harness import Call


class BookingTasks:
    untouched_reward: float | None = 0.0
    read_call: Call = ("find_bookings", {"guest": "Nina", "city": "Helsinki"})
    write_call: Call = ("book_room", {"hotel_id": 1, "guest": "Nina"})
    refused_call: Call = ("cancel_booking", {"booking_id": 1_000_000})
    bad_call: Call = ("find_bookings", {"nonsense": 1})

    def task(self, index: int) -> Mapping[str, Any]:
        return make_task("booking", "train", index)

    def solution(self, index: int) -> Sequence[Call]:
        return plan_calls(self.task(index))


@contextmanager
def stopped(pids: Iterable[int]) -> Generator[None]:
    """The processes stand still, with their sockets and pipes open."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
