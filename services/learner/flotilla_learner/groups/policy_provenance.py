"""Judgement of a try by its origin: the policies that wrote it, and its use for its group."""

import asyncio
from collections.abc import Sequence

import numpy as np

from flotilla_common.domain.policy import PolicyId
from flotilla_learner.group_types import GroupSpec, SubmittedTry
from flotilla_learner.groups.policy_history import PolicyLineage, PolicyStanding
from flotilla_learner.groups.workers import WorkerRoster

# Reason for not using a try whose worker has not proved that it serves the policy it claims.
UNVERIFIED = "unverified_policy"


class UnknownPolicyError(ValueError):
    """A trajectory names a policy that was never published."""


class Provenance:
    """Checks policies against publications and each worker's proof that it serves them (I6).

    `changed` is notified when a worker reports a policy."""

    # Time that a try waits for the report on a policy that wrote some of it.
    report_grace_s = 5.0

    def __init__(
        self,
        lineage: PolicyLineage,
        workers: WorkerRoster,
        changed: asyncio.Condition,
        run_epoch: int,
    ) -> None:
        self._lineage = lineage
        self._workers = workers
        self._changed = changed
        self._run_epoch = run_epoch

    async def judge_try(self, attempt: SubmittedTry) -> None:
        """Find out why a leased try is not used, if so.

        Raises UnknownPolicyError, or ValueError if a token was not sampled at the temperature of
        its lease, or without as many candidates: both are used for scoring."""
        _check_candidates(attempt)
        leased = np.float32(attempt.group.temperature)
        for span in attempt.trajectory.spans:
            if span.temperature is not None and np.float32(span.temperature) != leased:
                raise ValueError(
                    f"sampled at temperature {span.temperature}, not the lease's {leased}"
                )
        policies = attempt.trajectory.policies
        for policy in policies:
            if self._lineage.standing_of(policy) is PolicyStanding.UNKNOWN:
                raise UnknownPolicyError(f"{policy.run_epoch}:{policy.version} was never published")
        attempt.refusals = self._refusal_count(attempt.worker_id)
        shown = await self._wait_for_report(attempt.worker_id, policies)
        if shown and self.is_trusted(attempt):
            attempt.dropped = self.why_unusable(attempt.group, policies)
        else:
            attempt.dropped = UNVERIFIED

    def is_trusted(self, attempt: SubmittedTry) -> bool:
        """Return True if its worker was not refused since a try came.

        If it was, the worker's work in flight may come from other weights than it claims, even if
        it serves the right policy again by the time of a check."""
        return self._refusal_count(attempt.worker_id) == attempt.refusals

    def why_unusable(self, spec: GroupSpec, policies: Sequence[PolicyId]) -> str:
        """Return the reason why a group cannot use a try by these policies; empty if it can."""
        if any(self._lineage.standing_of(p) is not PolicyStanding.SURVIVING for p in policies):
            return "orphan_policy"
        if spec.exact_policy and any(p != spec.exact_policy for p in policies):
            return "other_policy"
        return ""

    async def _wait_for_report(self, worker_id: str, policies: Sequence[PolicyId]) -> bool:
        """Wait briefly until a worker proves that it serves these policies; else return False.

        An engine samples from new weights before its report arrives. Reports to an earlier epoch
        are no longer known; its policies are trusted."""
        mine = {policy for policy in policies if policy.run_epoch == self._run_epoch}

        def has_shown() -> bool:
            worker = self._workers.find_worker(worker_id)
            return not mine.difference(worker.served if worker else ())

        try:
            async with asyncio.timeout(self.report_grace_s), self._changed:
                await self._changed.wait_for(has_shown)
        except TimeoutError:
            return False
        return True

    def _refusal_count(self, worker_id: str) -> int:
        worker = self._workers.find_worker(worker_id)
        return worker.refusals if worker else 0


def _check_candidates(attempt: SubmittedTry) -> None:
    for sequence in attempt.trajectory.sequences:
        named = 0 if sequence.candidates is None else sequence.candidates.shape[1]
        if len(sequence.logprobs) and named != attempt.group.top_k:
            raise ValueError(
                f"{named} candidates of each token, but the lease asks for {attempt.group.top_k}"
                " (learner.top_k); only vLLM's engines name them"
            )
