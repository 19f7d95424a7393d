"""Signs of life from the watchers on replicas' machines, which make a look at SkyPilot needless."""

import time

from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_common.aio.concurrency import wait_for_event


class SignsOfLife:
    """What was heard of each replica's machines, by the replica's name.

    A replica is trusted while all of its machines report, and for `silent_s` after a report."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        # The time of the last report from each machine, by its number among the replica's.
        self._heard: dict[str, dict[int, float]] = {}
        self._doubts = ChangeSignal()

    def expect_reports(self, name: str) -> None:
        """Trust a replica that was started or found just now."""
        self._heard[name] = {0: time.monotonic()}

    def note_report(self, name: str, machine: int) -> None:
        """Note a report from one of a replica's machines. It restores the trust in one that was
        silent, not in one that was doubted."""
        if name in self._heard:
            self._heard[name][machine] = time.monotonic()

    def doubt_replica(self, name: str) -> None:
        """Stop trusting a replica, which has reported its exit or was killed."""
        self._heard.pop(name, None)
        self._doubts.notify_all()

    async def wait_until_doubtful(self, name: str) -> None:
        """Return once a replica is not trusted: then only SkyPilot can tell what became of it."""
        while (left_s := self._trusted_until(name) - time.monotonic()) > 0:
            await wait_for_event(self._doubts.next_change, left_s)

    def _trusted_until(self, name: str) -> float:
        heard = self._heard.get(name)
        return min(heard.values()) + self._silent_s if heard else 0.0
