"""A rollout worker that is attached for weights."""

import asyncio
from dataclasses import dataclass, field

from flotilla_common.domain.policy import PolicyId


@dataclass(slots=True)
class AttachedWorker:
    """One attached worker."""

    worker_id: str
    incarnation: str
    devices: int
    shares_memory: bool
    can_fetch: bool
    # Backend over which weights are sent into its engine; None if they are not.
    transfer: str | None = None
    # Devices of its engine that the sender must share, all of them, for `ipc`.
    shared_devices: frozenset[str] = frozenset()
    # It fetches all publications, and may receive differences.
    fetches_changes: bool = False
    holding: PolicyId | None = None
    sent: PolicyId | None = None
    # The next update goes through WeightService: a late joiner, or shared memory failed.
    fetch_next: bool = True
    # True if the engine's current weights must not be trusted.
    reload_next: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
