"""Start requests that SkyPilot's server has not answered yet, of this launcher or a dead one.

All calls block, as SkyPilot's do."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# SkyPilot's name of a request that starts a cluster.
_LAUNCH = "sky.launch"
# Longest upload of a submission's code; after that the server lists the request, or it is lost.
_HANDOVER_S = 900.0


@dataclass(slots=True)
class _Submission:
    """A submission on its way to the server, which sends code along: it has no number yet."""

    replica: str
    unwanted: bool = False
    begun: float = field(default_factory=time.monotonic)

    @property
    def lost(self) -> bool:
        return time.monotonic() > self.begun + _HANDOVER_S


class PendingRequests:
    """Follower of submissions, which also finds those of dead launchers."""

    def __init__(self, sky: Any) -> None:
        self._sky = sky
        self._lock = threading.Lock()
        self._handovers: list[_Submission] = []

    def follow_submission(self, replica: str, submit: Callable[[], Any]) -> Any:
        """Submit what starts a replica, and return what came of it."""
        with self._track_submission(replica) as handover:
            request = submit()
        if handover.unwanted:
            self._cancel_requests([request])
        return self._sky.get(request)

    @contextmanager
    def _track_submission(self, replica: str) -> Generator[_Submission]:
        handover = _Submission(replica)
        with self._lock:
            self._handovers.append(handover)
        try:
            yield handover
        finally:
            with self._lock:
                self._handovers.remove(handover)

    def is_start_pending(self, wanted: Callable[[str], bool]) -> bool:
        """Return whether an earlier request may still start one of these replicas."""
        return bool(self._matching_submissions(wanted) or self._open_requests(wanted))

    def cancel_pending(self, wanted: Callable[[str], bool]) -> bool:
        """Cancel requests that would start one of these replicas; return whether there were
        any.

        A cancelled request may have been fulfilled at the last moment."""
        handovers = self._matching_submissions(wanted)
        for handover in handovers:
            handover.unwanted = True
        requests = self._open_requests(wanted)
        if requests:
            self._cancel_requests(requests)
        return bool(handovers or requests)

    def _matching_submissions(self, wanted: Callable[[str], bool]) -> list[_Submission]:
        with self._lock:
            known = [each for each in self._handovers if not each.lost]
        return [each for each in known if wanted(each.replica)]

    def _open_requests(self, wanted: Callable[[str], bool]) -> list[str]:
        return [
            request.request_id
            for request in self._sky.api_status()
            if request.name == _LAUNCH and wanted(request.cluster_name or "")
        ]

    def _cancel_requests(self, requests: list[str]) -> None:
        self._sky.get(self._sky.api_cancel(requests, silent=True))
