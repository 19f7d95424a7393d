"""Registry of live instances, with their expiry, and of stopped ones. Pure: the clock is an
argument."""

import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flotilla_environments.api import Instance, open_instance

MAX_STOPPED = 1_000  # stopped instances remembered, to answer what became of one
ENVIRONMENT_VERSION = "v1"


class InstanceLimitError(Exception):
    """No further instance may run: the limit is reached."""


@dataclass(frozen=True)
class InstanceRequest:
    """A client's request for an instance; times in seconds."""

    env_key: str
    data_key: str
    data_version: str
    ttl: float
    run_id: str | None = None
    request_id: str | None = None
    heartbeat_interval: float | None = None
    env_variables: dict[str, Any] | None = None
    env_version: str = ENVIRONMENT_VERSION
    region: str = "local"
    profile_id: str | None = None


@dataclass
class InstanceRecord:
    """An instance's life; `instance` is None before it started and once it stopped."""

    wanted: InstanceRequest
    instance: Instance | None
    expires_at: float  # monotonic seconds
    heartbeat_at: float
    started_at: float | None = None
    instance_id: str = field(default_factory=lambda: f"i{uuid.uuid4().hex[:16]}")
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    terminated_at: datetime | None = None
    stop_reason: str | None = None

    @property
    def is_running(self) -> bool:
        return self.instance is not None

    @property
    def status(self) -> str:
        """Fleet's word for it."""
        if self.terminated_at is not None:
            return "stopped"
        return "running" if self.is_running else "pending"

    def heartbeat_due(self) -> float:
        """Return the time at which the instance stops unless its client shows up; infinity without
        a
        switch, and until it runs, for its client cannot show up before."""
        interval = self.wanted.heartbeat_interval
        return self.heartbeat_at + interval if interval and self.is_running else float("inf")


class Registry:
    """Live instances, pending or running, and the latest `MAX_STOPPED` stopped ones."""

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._live: dict[str, InstanceRecord] = {}
        self._stopped: OrderedDict[str, InstanceRecord] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self.created = 0
        self.stopped: Counter[str] = Counter()  # by reason

    def __len__(self) -> int:
        return len(self._live)

    def create_instance(self, wanted: InstanceRequest, now: float) -> InstanceRecord:
        """Open an instance. Raises `InstanceLimitError`, or `ValueError` for unknown data."""
        instance = open_instance(wanted.env_key, wanted.data_key, wanted.data_version)
        record = self.reserve_place(wanted, now)
        self.start_instance(record, instance, now)
        return record

    def reserve_place(self, wanted: InstanceRequest, now: float) -> InstanceRecord:
        """Take a place for an instance that starts later. Raises `InstanceLimitError`."""
        if len(self._live) >= self.max_running:
            raise InstanceLimitError
        record = InstanceRecord(wanted, None, expires_at=now + wanted.ttl, heartbeat_at=now)
        self._live[record.instance_id] = record
        self.created += 1
        if wanted.request_id:
            self._by_request[wanted.request_id] = record.instance_id
        return record

    def start_instance(self, record: InstanceRecord, instance: Instance, now: float) -> None:
        """Let a pending instance run from now on; one stopped in the meantime stays stopped."""
        if record.terminated_at is None:
            record.instance, record.started_at, record.heartbeat_at = instance, now, now

    def created_by(self, request_id: str | None) -> str | None:
        """Return the id of the instance, still remembered, that a request has created."""
        return self._by_request.get(request_id) if request_id else None

    def find_record(self, instance_id: str) -> InstanceRecord | None:
        return self._live.get(instance_id) or self._stopped.get(instance_id)

    def live_records(self) -> list[InstanceRecord]:
        return list(self._live.values())

    def all_records(self) -> Iterable[InstanceRecord]:
        return [*self._stopped.values(), *self._live.values()]

    def stop_instance(self, record: InstanceRecord, reason: str) -> None:
        """Free an instance; a stopped one stays as it is."""
        if record.terminated_at is not None:
            return
        if record.instance is not None:
            record.instance.close()
        record.instance = None
        record.terminated_at = datetime.now(UTC)
        record.stop_reason = reason
        self.stopped[reason] += 1
        del self._live[record.instance_id]
        self._stopped[record.instance_id] = record
        if len(self._stopped) > MAX_STOPPED:
            forgotten = self._stopped.popitem(last=False)[1]
            if forgotten.wanted.request_id:
                self._by_request.pop(forgotten.wanted.request_id, None)

    def stop_expired(self, now: float) -> None:
        for record in self.live_records():
            if now >= record.expires_at:
                self.stop_instance(record, "ttl")
            elif now >= record.heartbeat_due():
                self.stop_instance(record, "heartbeat")
