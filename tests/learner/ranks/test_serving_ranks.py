"""Several ranks that train models at callers' requests are like one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flotilla_learner.config.training import TrainingServiceConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.rank_group import RankGroup
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training.serving_ranks import ServingRanks
from flotilla_learner.training_types import AdamUpdate, AdapterChoice, BaseModel, TargetScores
from tests.support.rank_configs import policy_config
from tests.support.target_batches import make_batch

UPDATE = AdamUpdate(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0)
pytestmark = [pytest.mark.usefixtures("forked_ranks"), pytest.mark.timeout(300)]


def make_ranks(model: Path, folder: Path, processes: int, *, frozen: bool = True) -> ServingRanks:
    folder.mkdir(exist_ok=True)
    rank = {"processes": processes, "pack_tokens": 32, "head_chunk": 16}
    config = TrainingServiceConfig.model_validate({"rank": rank})
    group = RankGroup("several", config.rank, folder / "rank.log", folder)
    return ServingRanks(group, policy_config(model), config, frozen=frozen)


async def train(ranks: ServingRanks, model: str, choice: AdapterChoice) -> list[TargetScores]:
    await ranks.create(model, choice)
    found: list[TargetScores] = []
    for step in range(3):
        # At last fewer sequences than ranks.
        for loss, count in (("cross_entropy", 5), ("gspo", 1 if step == 2 else 4)):
            found.append(await ranks.accumulate(model, make_batch(loss, seed=step, count=count)))
        await ranks.update(model, UPDATE)
    return found


@pytest.mark.parametrize("frozen", [True, False])
async def test_several_ranks_train_as_one(model_folder: Path, tmp_path: Path, frozen: bool) -> None:
    choice = AdapterChoice(4 if frozen else 0, seed=1)
    weights: list[dict[str, torch.Tensor]] = []
    scores: list[list[TargetScores]] = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        ranks = make_ranks(model_folder, folder, processes, frozen=frozen)
        try:
            assert (await ranks.start()).vocabulary == 97
            scores.append(await train(ranks, "a", choice))
            await ranks.save("a", folder / "state", 9, with_optimizer=False)
        finally:
            await ranks.close()
        (file,) = (folder / "state").glob("*.safetensors")
        weights.append(load_file(file))
    one, two = weights
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)
    for alone, several in zip(*scores, strict=True):
        assert several.metrics == pytest.approx(alone.metrics, rel=1e-4)
        for values, others in zip(alone.logprobs, several.logprobs, strict=True):
            np.testing.assert_allclose(others, values, rtol=0, atol=1e-4)


async def test_a_refusal_is_of_all_ranks_and_they_train_on(
    model_folder: Path, tmp_path: Path
) -> None:
    ranks = make_ranks(model_folder, tmp_path / "ranks", 2)
    try:
        found = await ranks.start()
        assert isinstance(found, BaseModel)
        await ranks.create("a", AdapterChoice(4))
        batch = make_batch("importance_sampling")
        # Of one sequence, which one of the ranks computes.
        batch.sequences[0].inputs["logprobs"][:] = -1e9  # pyright: ignore[reportIndexIssue]
        with pytest.raises(OperationRefused, match="nothing was accumulated") as caught:
            await ranks.accumulate("a", batch)
        assert caught.value.reason == "NOT_FINITE"
        await train(ranks, "b", AdapterChoice(2))
    finally:
        await ranks.close()
    with pytest.raises(RankError):
        await ranks.update("a", UPDATE)
