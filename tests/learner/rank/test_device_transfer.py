"""Packs follow each other without a wait: what they leave on the device is read all at once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from flotilla_learner.algo.objective import Objective
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.gradient_accumulator import GradientAccumulator
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.step_examples import TrainExample
from tests.support.tiny_ranks import make_batch, make_trainer


class CountedOperators(TorchDispatchMode):
    """Count operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_no_number_is_read_between_packs(model_folder: Path, name: str) -> None:
    given: dict[str, Any] = {"advantage": "gae", "entropy_coefficient": 0.01}
    given |= {"proximal": "trainer", "correction": {"token_tis": 2.0}}
    algorithm = AlgorithmConfig.model_validate(given if name == "everything" else {})
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    rows = [Row.from_sequence(i, s) for i, s in enumerate(make_batch(policy).sequences)]
    packer = RowPacker(policy, 64, Replicas())
    accumulator = GradientAccumulator(policy, trainer.critic, packer, chunk=16, entropy_bonus=True)
    none = [np.zeros(len(row.positions)) for row in rows]
    examples = [
        TrainExample(
            row, zero + 1.0, moves=True, weight=0.1, values=zero.astype(np.float32), returns=zero
        )
        for row, zero in zip(rows, none, strict=True)
    ]
    with CountedOperators() as seen:
        sums, stats = accumulator.add_policy_gradients(examples, Objective(algorithm))
        if trainer.critic is not None:
            sums += accumulator.add_critic_gradients(examples)
        scores = score_rows(policy, rows, packer, chunk=16)
    assert seen.counts["aten.detach.default"]
    assert not seen.counts["aten._local_scalar_dense.default"]
    assert stats.logprobs.keys() == scores.keys() == {row.index for row in rows}
    assert sums.objective.tokens == sum(len(row.positions) for row in rows)
