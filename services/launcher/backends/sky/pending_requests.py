"""What SkyPilot's server was asked to start and has not answered yet: by this launcher, or by one
that is dead and whose request is not.

All calls block, as SkyPilot's do.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from services.launcher.backends.sky import names

# Nobody's code is on its way for longer: what the server has heard is on its list, and what it has
# not is lost.
_HANDOVER_S = 900.0


@dataclass(slots=True)
class _Handover:
    """A submission on its way to the server, which sends code along: it has no number yet."""

    replicas: Sequence[str]
    unwanted: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def lost(self) -> bool:
        return time.monotonic() > self.begun + _HANDOVER_S


class Requests:
    """Follows submissions, and finds those that nobody follows any more."""

    def __init__(self, sky: Any) -> None:
        self._sky = sky
        self._lock = threading.Lock()
        self._handovers: list[_Handover] = []

    def follow(self, replicas: Sequence[str], submit: Callable[[], Any]) -> Any:
        """Submit what starts these replicas, and return what came of it."""
        with self._handed_over(replicas) as handover:
            request = submit()
        if handover.unwanted:
            self._cancel([request])
        return self._sky.get(request)

    @contextmanager
    def _handed_over(self, replicas: Sequence[str]) -> Generator[_Handover]:
        handover = _Handover(replicas)
        with self._lock:
            self._handovers.append(handover)
        try:
            yield handover
        finally:
            with self._lock:
                self._handovers.remove(handover)

    def under_way(self, wanted: Callable[[str], bool]) -> bool:
        """Whether one of these replicas may still come of what was asked before."""
        return bool(self._matching(wanted) or self._open(wanted))

    def forget(self, wanted: Callable[[str], bool]) -> bool:
        """Cancel what would start one of these replicas; whether there was any such thing. What
        was cancelled may have come about at the last moment."""
        handovers = self._matching(wanted)
        for handover in handovers:
            handover.unwanted = True
        requests = self._open(wanted)
        if requests:
            self._cancel(requests)
        return bool(handovers or requests)

    def _matching(self, wanted: Callable[[str], bool]) -> list[_Handover]:
        with self._lock:
            known = [each for each in self._handovers if not each.lost]
        return [each for each in known if any(map(wanted, each.replicas))]

    def _open(self, wanted: Callable[[str], bool]) -> list[str]:
        return [
            request.request_id
            for request in self._sky.api_status()
            if any(map(wanted, _replicas(request)))
        ]

    def _cancel(self, requests: list[str]) -> None:
        self._sky.get(self._sky.api_cancel(requests, silent=True))


def _replicas(request: Any) -> set[str]:
    """The replicas that a request of the server's list is to start."""
    match request.name:
        case "sky.jobs.launch":
            return names.members_in(request.request_body or "")
        case "sky.launch":
            # SkyPilot's own, for a managed job, has a number behind the name of the replica.
            return names.members_in(request.cluster_name or "")
        case _:
            return set()
