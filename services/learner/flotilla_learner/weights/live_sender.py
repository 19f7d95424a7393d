"""The learner's handle on the sender of weights into live engines; without it engines fetch."""

import asyncio
from pathlib import Path

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.line_channel import ChildLostError
from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.types import Publication
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.sender_config import WeightSenderConfig

# The sender's own main module: its imports do not belong in this process.
_MODULE = "flotilla_learner.weights.adapters.weight_sender"
_PING_SECONDS = 5.0

_losses = metrics.event_counter(
    "flotilla_weight_sender_losses", "Times that the sender of weights into engines was lost"
)
_log = get_logger(__name__)


class LiveSender:
    """The sender's process, started for the first engine that it can serve.

    Losing it only costs speed: engines fetch until it is back. Implements
    `ports.SnapshotServer`."""

    def __init__(self, start: WeightSenderConfig, log_path: Path) -> None:
        """Create it; the process logs to `log_path`."""
        self._start = start
        self._child = PublicationChild(_MODULE, log_path)
        # Starts the process, then monitors it.
        self._keeping: asyncio.Task[None] | None = None
        # Address at which engines meet it; None while it is not running.
        self.address: str | None = None
        # Devices of engines that it cannot reach over `ipc`.
        self._apart: set[frozenset[str]] = set()
        self._served: PolicyId | None = None

    def can_send(self, policy: PolicyId, devices: frozenset[str] = frozenset()) -> bool:
        """Return True if it can send `policy` to engines, through memory of `devices` if any are
        given."""
        if self.address is None or self._served != policy:
            return False
        if not devices <= self._child.devices:
            self._note_apart(devices)
            return False
        return True

    def start_soon(self) -> None:
        """Start it in the background, unless it is running or starting."""
        if self.address is None and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.create_task(self._keep_child())

    async def serve_publication(self, publication: Publication, policy_id: PolicyId) -> None:
        """See `ports.SnapshotServer`. Never fails: engines that are not sent weights fetch them."""
        if self._keeping is None:
            return
        if not self._is_there():
            self.start_soon()
            return
        try:
            await self._child.serve_publication(publication, policy_id)
            self._served = policy_id
        except (ChildLostError, OSError) as error:
            if not self._is_there():
                # Its keeper noticed first and is ending it; cancelling it would leave the process.
                return
            await cancel_tasks([self._keeping])
            self._note_loss(error)
            self.start_soon()

    async def close(self) -> None:
        """End the process. May be called again, and in any state."""
        self.address = None
        if self._keeping is not None:
            await cancel_tasks([self._keeping])
        await self._child.close()

    async def _keep_child(self) -> None:
        """Start the process and ping it every few seconds; kill it if it does not answer, because
        an engine that joins a stalled sender waits for as long as that lives."""
        await self._child.close()
        try:
            self.address = await self._child.start_process(self._start)
        except (ChildLostError, OSError) as error:
            _log.warning("engines fetch weights: their sender does not start", reason=str(error))
            return
        try:
            while True:
                await asyncio.sleep(_PING_SECONDS)
                await self._child.check_answers()
        except (ChildLostError, OSError) as error:
            self._note_loss(error)
        await self._child.close()

    def _is_there(self) -> bool:
        return self.address is not None

    def _note_loss(self, error: Exception) -> None:
        self.address = None
        _losses()()
        _log.warning("engines fetch weights: their sender is lost", reason=str(error))

    def _note_apart(self, devices: frozenset[str]) -> None:
        if devices not in self._apart:
            self._apart.add(devices)
            _log.warning(
                "weights go by shared memory, not by ipc: the engine has other devices",
                engine=sorted(devices),
                sender=sorted(self._child.devices),
            )
