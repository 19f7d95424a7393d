"""Which policies were published, and which of them the run still stands on."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from services.learner.types import PolicyId


class Standing(Enum):
    """What the run says of a policy."""

    SURVIVING = auto()
    # Published by an earlier epoch, past the version at which a later one took over.
    ORPHANED = auto()
    UNKNOWN = auto()


class Lineage:
    """Policy (e, v) survives if v is at most the version at which each later epoch forked."""

    def __init__(self, published: Iterable[PolicyId], forks: Mapping[int, int]) -> None:
        self._fingerprints = {(p.run_epoch, p.version): p.fingerprint for p in published}
        self._forks = dict(forks)

    def add(self, policy: PolicyId) -> None:
        self._fingerprints[policy.run_epoch, policy.version] = policy.fingerprint

    def standing(self, policy: PolicyId) -> Standing:
        """A policy named with another fingerprint than the published one, or none, is unknown."""
        known = self._fingerprints.get((policy.run_epoch, policy.version))
        if known is None or policy.fingerprint != known:
            return Standing.UNKNOWN
        later = [fork for epoch, fork in self._forks.items() if epoch > policy.run_epoch]
        survives = all(policy.version <= fork for fork in later)
        return Standing.SURVIVING if survives else Standing.ORPHANED

    def fingerprints_of(self, version: int) -> set[bytes]:
        """Under which fingerprints any epoch published a version."""
        return {digest for (_, v), digest in self._fingerprints.items() if v == version}
