"""Which policy wrote a trajectory, and whether that makes it fit for its group."""

from collections.abc import Sequence

from services.learner.groups.messages import UnknownPolicyError
from services.learner.groups.policy_history import Lineage, Standing
from services.learner.groups.types import GroupSpec
from services.learner.groups.workers import Roster
from services.learner.types import PolicyId


class Provenance:
    """Judges policies by what was published and by what each worker has shown to serve (I6)."""

    def __init__(self, lineage: Lineage, workers: Roster, run_epoch: int) -> None:
        self._lineage = lineage
        self._workers = workers
        self._run_epoch = run_epoch

    def check_published(self, policies: Sequence[PolicyId]) -> None:
        """Raises UnknownPolicyError."""
        for policy in policies:
            if self._lineage.standing(policy) is Standing.UNKNOWN:
                raise UnknownPolicyError(f"{policy.run_epoch}:{policy.version} was never published")

    def shown(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Whether a worker was accepted for these.

        Reports to an earlier epoch are not known any more; its policies are believed.
        """
        worker = self._workers.get(worker_id)
        mine = {policy for policy in policies if policy.run_epoch == self._run_epoch}
        return not mine.difference(worker.served if worker else ())

    def refusals(self, worker_id: str) -> int:
        """How often a worker was refused. When that grows, what it has under way is not what it
        says, though it may serve the same policy again by the time that it is looked at."""
        worker = self._workers.get(worker_id)
        return worker.refusals if worker else 0

    def unusable(self, spec: GroupSpec, policies: Sequence[PolicyId]) -> str:
        """Why a group cannot use what these wrote, or nothing."""
        if any(self._lineage.standing(p) is not Standing.SURVIVING for p in policies):
            return "orphan_policy"
        if spec.exact_policy and any(p != spec.exact_policy for p in policies):
            return "other_policy"
        return ""
