"""Published policies, and those that the run still builds on."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from flotilla_common.domain.policy import PolicyId


class PolicyStanding(Enum):
    """Status of a policy in the run."""

    SURVIVING = auto()
    # Published by an earlier epoch, past the version at which a later one took over.
    ORPHANED = auto()
    UNKNOWN = auto()


class PolicyLineage:
    """History of published policies over the run's epochs.

    Policy (e, v) survives if v is at most the version at which each later epoch forked."""

    def __init__(self, published: Iterable[PolicyId], forks: Mapping[int, int]) -> None:
        self._fingerprints = {(p.run_epoch, p.version): p.fingerprint for p in published}
        self._forks = dict(forks)

    def add_policy(self, policy: PolicyId) -> None:
        self._fingerprints[policy.run_epoch, policy.version] = policy.fingerprint

    def standing_of(self, policy: PolicyId) -> PolicyStanding:
        """Return a policy's standing.

        A policy with another fingerprint than the published one, or with none, is
        unknown."""
        known = self._fingerprints.get((policy.run_epoch, policy.version))
        if known is None or policy.fingerprint != known:
            return PolicyStanding.UNKNOWN
        later = [fork for epoch, fork in self._forks.items() if epoch > policy.run_epoch]
        survives = all(policy.version <= fork for fork in later)
        return PolicyStanding.SURVIVING if survives else PolicyStanding.ORPHANED

    def fingerprints_of(self, version: int) -> set[bytes]:
        """Return the fingerprints under which any epoch published a version."""
        return {digest for (_, v), digest in self._fingerprints.items() if v == version}
