"""Bounds of what clients may order and keep."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the front door; those of a tenant apply to each."""

    # Orders of a tenant without a result, and bytes of their bodies.
    most_orders: int = 20_000
    most_order_bytes: int = GIB
    # Bytes of one order's body.
    largest_order: int = 128 * 2**20
    # Models of a tenant that exist concurrently.
    most_models: int = 8
    # Bytes of a tenant's checkpoints and samplers, and bytes that a disk keeps free.
    most_disk_bytes: int = 100 * GIB
    free_disk_bytes: int = GIB
    # Weights of a sampling session that nobody used for so long make room when it is needed.
    unused_s: float = 3600.0
    # Bytes of the archives of all checkpoints; the oldest are removed.
    most_archive_bytes: int = 20 * GIB
    # A result is kept this long after its delivery, or undelivered, and in these bytes in all.
    delivered_s: float = 300.0
    undelivered_s: float = 86_400.0
    most_result_bytes: int = 4 * GIB
    # A session ends after this long without a heartbeat; clients send one every 10 s.
    stale_s: float = 900.0
    # One that is silent for this long makes room when its models' places are needed.
    silent_s: float = 60.0
    # The last states of its models are kept for so long.
    last_state_s: float = 7 * 86_400.0
    # An order that waits this long for an earlier number is given up.
    gap_s: float = 900.0
    # A model's state is saved after this many updates, or bytes of journaled operations.
    recovery_updates: int = 20
    recovery_bytes: int = 256 * 2**20
    # An order with which a peer was lost this often fails; at least 2.
    most_deaths: int = 3


DEFAULT_LIMITS = Limits()
