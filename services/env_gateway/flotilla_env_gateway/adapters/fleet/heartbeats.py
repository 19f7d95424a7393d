"""Heartbeats that keep Fleet's instances alive: one task for all of them."""

import asyncio
import math
from contextlib import suppress
from typing import Protocol

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks, raise_failure
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.fleet.heartbeat_schedule import HeartbeatSchedule
from flotilla_env_gateway.ports import BackendError

_LOG = get_logger(__name__)
# Failures come by the hundred when a server is down, so they are logged together.
_LOG_INTERVAL_S = 10.0
# "ok", the kind of error, or "lost" for an instance that ended unconfirmed.
_heartbeat_results = metrics.event_counter(
    "flotilla_heartbeats", "Heartbeats of instances to their backend", "result"
)


class HeartbeatTarget(Protocol):
    async def send_heartbeat(self, timeout_s: float) -> None:
        """Send a heartbeat. Raises BackendError if it fails, `lost` if the instance is gone."""
        ...

    def mark_ended(self, why: str) -> None:
        """Mark the instance as ended, because no heartbeat was confirmed in time."""
        ...


class Heartbeats:
    """Heartbeats for each watched instance until it is forgotten or gone. An instance without a
    confirmed heartbeat for `ttl_s` is marked as ended."""

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._schedule = HeartbeatSchedule(ttl_s=ttl_s)
        self._instances: dict[str, HeartbeatTarget] = {}
        self._beats = BackgroundTasks()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self.last_failure = ""
        self._logged_at = -math.inf

    def __len__(self) -> int:
        """The number of watched instances."""
        return len(self._schedule)

    @property
    def late_count(self) -> int:
        """The number of instances that may end soon: nothing was confirmed for two thirds of their
        time."""
        return self._schedule.count_late(loop_time())

    def watch_instance(self, instance_id: str, instance: HeartbeatTarget) -> None:
        self._instances[instance_id] = instance
        self._schedule.watch_instance(instance_id, loop_time())
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep_beating())

    def forget_instance(self, instance_id: str) -> None:
        self._instances.pop(instance_id, None)
        self._schedule.forget_instance(instance_id)

    async def close(self) -> None:
        for instance_id in list(self._instances):
            self.forget_instance(instance_id)
        tasks = [task for task in (self._task, *self._beats.running) if task is not None]
        await cancel_tasks(tasks)
        raise_failure(tasks)

    async def _keep_beating(self) -> None:
        while True:
            now = loop_time()
            for instance_id in self._schedule.pop_lost(now):
                self._drop_lost(instance_id)
            for instance_id in self._schedule.begin_due_beats(now):
                self._beats.start_task(self._send_beat(instance_id, self._instances[instance_id]))
            if now - self._logged_at >= _LOG_INTERVAL_S:
                self._log_failures(now)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._schedule.next_event_at()):
                    await self._changed.wait()

    async def _send_beat(self, instance_id: str, instance: HeartbeatTarget) -> None:
        try:
            await instance.send_heartbeat(self._schedule.timeout_s)
        except BackendError as error:
            self._note_failure(instance_id, error)
        except Exception as error:  # noqa: BLE001
            # The loop must continue, or all other instances would end.
            _LOG.exception("heartbeat_failed", instance=instance_id)
            self._note_failure(instance_id, BackendError("internal", repr(error), delivered=None))
        else:
            _heartbeat_results("ok")()
            self._schedule.confirm_beat(instance_id, loop_time())
        self._changed.set()

    def _note_failure(self, instance_id: str, error: BackendError) -> None:
        _heartbeat_results(error.kind)()
        if error.lost:
            _LOG.warning("instance_ended", instance=instance_id, error=str(error))
            self.forget_instance(instance_id)
            return
        self._schedule.record_failure(instance_id, loop_time(), error.retry_after_s)
        self._failures += 1
        self.last_failure = str(error)

    def _log_failures(self, now: float) -> None:
        late = self._schedule.count_late(now)
        if not late and not self._failures:
            return
        log, event = (
            (_LOG.error, "heartbeats_late") if late else (_LOG.warning, "heartbeats_failed")
        )
        log(
            event,
            late=late,
            instances=len(self._schedule),
            failures=self._failures,
            error=self.last_failure,
        )
        self._failures, self._logged_at = 0, now

    def _drop_lost(self, instance_id: str) -> None:
        why = f"Fleet has confirmed no heartbeat for {self._ttl_s:g} s, and ends the instance"
        _LOG.error("instance_lost", instance=instance_id, why=why)
        _heartbeat_results("lost")()
        self._instances.pop(instance_id).mark_ended(why)
