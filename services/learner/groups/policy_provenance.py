"""Origin of a trajectory: the policy that wrote it, and its use for its group."""

from collections.abc import Sequence

from services.common.domain.policy import PolicyId
from services.learner.group_types import GroupSpec
from services.learner.groups.policy_history import PolicyLineage, PolicyStanding
from services.learner.groups.workers import WorkerRoster


class UnknownPolicyError(ValueError):
    """A trajectory names a policy that was never published."""


class Provenance:
    """Checks policies against publications and each worker's proof that it serves them (I6)."""

    def __init__(self, lineage: PolicyLineage, workers: WorkerRoster, run_epoch: int) -> None:
        self._lineage = lineage
        self._workers = workers
        self._run_epoch = run_epoch

    def check_published(self, policies: Sequence[PolicyId]) -> None:
        """Check that all of these policies were published. Raises UnknownPolicyError."""
        for policy in policies:
            if self._lineage.standing_of(policy) is PolicyStanding.UNKNOWN:
                raise UnknownPolicyError(f"{policy.run_epoch}:{policy.version} was never published")

    def has_shown(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Return True if a worker was accepted for these policies.

        Reports to an earlier epoch are no longer known; its policies are trusted."""
        worker = self._workers.find_worker(worker_id)
        mine = {policy for policy in policies if policy.run_epoch == self._run_epoch}
        return not mine.difference(worker.served if worker else ())

    def refusal_count(self, worker_id: str) -> int:
        """Return how often a worker was refused.

        If that grows, the worker's work in flight may come from other weights than it claims, even
        if it serves the right policy again by the time of a check."""
        worker = self._workers.find_worker(worker_id)
        return worker.refusals if worker else 0

    def why_unusable(self, spec: GroupSpec, policies: Sequence[PolicyId]) -> str:
        """Return the reason why a group cannot use a try by these policies; empty if it can."""
        if any(self._lineage.standing_of(p) is not PolicyStanding.SURVIVING for p in policies):
            return "orphan_policy"
        if spec.exact_policy and any(p != spec.exact_policy for p in policies):
            return "other_policy"
        return ""
