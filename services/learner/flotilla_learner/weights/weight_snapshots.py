"""Publications as known to a process beside the learner: the file that holds each."""

from dataclasses import dataclass

from pydantic import Base64Bytes

# Newest publications held; the slot of the one before them is being rewritten.
KEPT = 2


class SupersededError(Exception):
    """A publication is not held, or no longer."""


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """One publication: its name and the file that holds it."""

    run_epoch: int
    version: int
    fingerprint: Base64Bytes
    path: str
    total_bytes: int


class SnapshotCache:
    """The newest two publications, in order of announcement."""

    def __init__(self) -> None:
        self._snapshots: dict[tuple[int, int, bytes], WeightSnapshot] = {}

    def add_snapshot(self, snapshot: WeightSnapshot) -> None:
        """Add the newest publication; the oldest of more than two is superseded."""
        key = (snapshot.run_epoch, snapshot.version, snapshot.fingerprint)
        self._snapshots.pop(key, None)
        self._snapshots[key] = snapshot
        while len(self._snapshots) > KEPT:
            del self._snapshots[next(iter(self._snapshots))]

    def holds(self, snapshot: WeightSnapshot) -> bool:
        """Return True while a publication is held: everything read of it so far is valid."""
        return snapshot in self._snapshots.values()

    def newest_pair(self) -> tuple[WeightSnapshot, WeightSnapshot] | None:
        """Return the second newest publication and the newest; None without two."""
        newest = tuple(self._snapshots.values())[-2:]
        return newest if len(newest) == 2 else None

    def find_snapshot(self, run_epoch: int, version: int, fingerprint: bytes) -> WeightSnapshot:
        """Find a publication. Raises SupersededError if it is not held, or no longer."""
        snapshot = self._snapshots.get((run_epoch, version, fingerprint))
        if snapshot is None:
            raise SupersededError(f"version {version} of epoch {run_epoch} is not served")
        return snapshot
