"""A replica's membership in a run: registration, heartbeats, and the launcher's commands."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio

from flotilla_common.aio.concurrency import wait_for_event
from flotilla_common.rpc.peer_channels import RegistryContract
from flotilla_common.rpc.rpc import service_error, to_seconds
from flotilla_common.rpc.tls import likely_cause
from flotilla_common.telemetry.log import get_logger

_CALL_TIMEOUT_S = 5.0
_FAREWELL_TIMEOUT_S = 2.0
# Interval until the registry sets one.
_INTERVAL_S = 1.0
_ORPHAN_AFTER_S = 60.0
_REPLACED = "REPLACED"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """A currently raised alarm. `severity`: notice | warning | error."""

    rule: str
    scope: str
    severity: str
    step: int
    cause: str
    fix: str


@dataclass(slots=True)
class ReplicaStatus:
    """Status of a replica, sent with each heartbeat."""

    phase: str = "starting"
    serving: bool = False
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    alarms: Sequence[RaisedAlarm] = ()
    # URL of the run's page at a tracker.
    tracker_url: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Identity of a process within a run; `incarnation` is new for every process."""

    run_id: str
    service: str
    replica: int
    incarnation: str


class Membership:
    """Registration of an address, and heartbeats.

    It calls `drain(reason)` on the launcher's command, or if no heartbeat has succeeded for
    `orphan_after`, and `stop(reason)` on command or when another incarnation replaces this one.
    `on_metrics` gets the metrics that the launcher sends along. `status` is called at each
    heartbeat."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        contract: RegistryContract,
        channel: grpc.aio.Channel,
        *,
        status: Callable[[], ReplicaStatus],
        drain: Callable[[str], None],
        stop: Callable[[str], None],
        on_metrics: Callable[[Mapping[str, float]], None] | None = None,
        metrics_address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._messages = contract.messages
        self._stub = contract.stub(channel)
        self._status = status
        self._drain = drain
        self._stop = stop
        self._on_metrics = on_metrics
        self._metrics_address = metrics_address
        self._clock = clock
        self._interval_s = _INTERVAL_S
        self._orphan_after_s = _ORPHAN_AFTER_S
        self._registered = False
        self._hurried = asyncio.Event()
        self._address = ""
        # The likely cause of the last failure.
        self._cause = ""

    async def run(self, address: str) -> None:
        """Stay a member until cancelled, stopped or replaced."""
        self._address = address
        heard_at = self._clock()
        orphaned = False
        while True:
            self._hurried.clear()
            try:
                ended = await self._send_heartbeat(address)
            except grpc.aio.AioRpcError as error:
                ended = self._note_failure(error)
            else:
                heard_at, orphaned = self._clock(), False
            if ended:
                return
            if not orphaned and self._clock() - heard_at > self._orphan_after_s:
                orphaned = True
                because = f": {self._cause}" if self._cause else ""
                self._drain(f"launcher silent for {self._orphan_after_s:.0f} s{because}")
            await wait_for_event(self._hurried, self._interval_s)

    def hurry_heartbeat(self) -> None:
        """Send the next heartbeat now."""
        self._hurried.set()

    async def send_last_heartbeat(self) -> None:
        """Send one last heartbeat: the outcome must not be lost between two of them."""
        try:
            async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                await self._send_heartbeat(self._address)
        except TimeoutError:
            _log.warning("the last heartbeat took too long")
        except grpc.aio.AioRpcError as error:
            _log.warning("the last heartbeat failed", code=error.code().name)

    async def _send_heartbeat(self, address: str) -> bool:
        """Register or send a heartbeat; return True if membership is over."""
        if not self._registered:
            response = await self._stub.Register(
                self._make_registration(address), timeout=_CALL_TIMEOUT_S
            )
            self._interval_s = to_seconds(response.heartbeat_interval) or _INTERVAL_S
            self._orphan_after_s = to_seconds(response.orphan_after) or _ORPHAN_AFTER_S
            self._registered = True
        response = await self._stub.Heartbeat(self._make_heartbeat(), timeout=_CALL_TIMEOUT_S)
        if self._on_metrics is not None and response.metrics:
            self._on_metrics(dict(response.metrics))
        if response.command == self._messages.COMMAND_DRAIN:
            self._drain("the launcher ordered a drain")
        if response.command == self._messages.COMMAND_STOP:
            self._stop("the launcher ordered a stop")
            return True
        return False

    def _note_failure(self, error: grpc.aio.AioRpcError) -> bool:
        reason = service_error(error)
        if reason is not None and reason.reason == _REPLACED:
            self._stop("another process has taken this replica's place")
            return True
        # A launcher that answers but has forgotten this process gets a new registration.
        self._registered = self._registered and reason is None
        code, self._cause = error.code().name, likely_cause(error.details())
        _log.warning(
            "a heartbeat failed", code=code, details=error.details(), likely_cause=self._cause
        )
        return False

    def _make_registration(self, address: str) -> Any:
        places = {"address": address, "metrics_address": self._metrics_address}
        return self._messages.RegisterRequest(**asdict(self._identity), **places, pid=os.getpid())

    def _make_heartbeat(self) -> Any:
        status = self._status()
        return self._messages.HeartbeatRequest(
            **asdict(self._identity),
            phase=status.phase,
            serving=status.serving,
            step=status.step,
            total_steps=status.total_steps,
            metrics=status.metrics,
            alarms=[_alarm_to_wire(alarm) for alarm in status.alarms],
            tracker_url=status.tracker_url,
        )


def _alarm_to_wire(alarm: RaisedAlarm) -> dict[str, Any]:
    return {**asdict(alarm), "severity": f"ALARM_SEVERITY_{alarm.severity.upper()}"}
