"""Command `compare` of a rank."""

from dataclasses import replace

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.mismatch_hypotheses import SuspectModel, evaluate_hypotheses
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.score_comparison import ScoreComparer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import Comparison, TrainBatch


class CompareCommand:
    """Compares engine and trainer scores, and looks for the cause on request."""

    def __init__(
        self, policy: Policy, slots: WeightSlots, config: PolicyConfig, rank: RankConfig
    ) -> None:
        self._policy = policy
        self._slots = slots
        self._config = config
        self._rank = rank
        scaling = config.rope_scaling or {}
        original = scaling.get("original_max_position_embeddings")
        split = int(original) if original is not None else None
        self._comparer = ScoreComparer(policy, slots, rank, split=split)

    def run_comparison(self, batch: TrainBatch, version: int, *, diagnose: bool) -> Comparison:
        """Compare a batch; `version` is that of the weights in the model.

        Raises ValueError for a batch made for other weights."""
        if batch.step - 1 != version:
            raise ValueError(f"a batch for version {batch.step - 1}, the weights are {version}")
        with self._policy.showing(batch):
            found = self._comparer.compare_batch(batch)
            if not diagnose:
                return found
            suspect = SuspectModel(self._policy, self._slots, self._config, self._rank, version)
            hypotheses = evaluate_hypotheses(suspect, batch)
        return replace(found, hypotheses=hypotheses, experts=self._policy.has_experts)
