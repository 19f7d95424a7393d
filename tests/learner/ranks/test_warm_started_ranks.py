"""Rank processes whose first steps imitate: what they begin the other steps with, wherever they are
started again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla_common.spec.config import parse_config
from flotilla_learner.checkpoints.export import export_model
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import ModelInfo, StepResult, TrainBatch
from tests.learner.rank.test_trainer_imitation import demonstrations
from tests.support.checkpoints import load_group, save_ranks
from tests.support.rank_configs import EVERYTHING, LEARNER, policy_config
from tests.support.tiny_ranks import make_batch, same_bits

pytestmark = pytest.mark.usefixtures("forked_ranks")
WARM, STEPS = 3, 3
LAST = WARM + STEPS
EVERY: dict[str, Any] = {**EVERYTHING, "critic": {"lr": 1e-3, "warmup_steps": 1}}
Saved = Mapping[str, Mapping[str, Tensor]]


def batch_of(step: int) -> TrainBatch:
    """A step's batch; those after the warm start lie off the policy, so that ratios matter."""
    if step <= WARM:
        return demonstrations(step)
    return replace(make_batch(groups=3, size=4, shift=0.1), step=step)


def configured(
    algorithm: Mapping[str, Any], processes: int = 1, *, lora: bool = False, **warm: Any
) -> LearnerConfig:
    values: dict[str, Any] = {
        **LEARNER.model_dump(mode="json", exclude_unset=True),
        "steps": STEPS,
        "algorithm": algorithm,
        "optimizer": {"lr": 1e-3, "eps": 1e-4, "warmup_steps": 2, "schedule": "linear"},
        "rank": {"pack_tokens": 128, "processes": processes, "shard": processes > 1},
        "warm_start": {"data": "none", "sequences_per_step": 1, "steps": WARM, **warm},
    }
    if lora:
        values["lora"] = {"rank": 4, "alpha": 8}
    return parse_config(LearnerConfig, values, where="test")


class Trial:
    """Ranks that train some steps in one start, and then save."""

    def __init__(
        self, model: Path, folder: Path, config: LearnerConfig, dtype: str = "float32"
    ) -> None:
        folder.mkdir()
        self._folder = folder
        policy = policy_config(model, dtype=dtype)
        self._ranks = LocalRanks("warm", policy, config, folder / "log", folder)
        self.results: list[StepResult] = []
        self.info: ModelInfo | None = None

    async def run(self, steps: range, checkpoint: Path | None = None, *, first: int = 0) -> Path:
        """Train the steps; they have the batches of those that follow step `first`."""
        try:
            self.info = await self._ranks.start_ranks(checkpoint)
            self.results = [
                await self._ranks.train_step(replace(batch_of(first + step), step=step))
                for step in steps
            ]
            return (await save_ranks(self._ranks, self._folder / "checkpoint")).directory
        finally:
            await self._ranks.close()

    def metric(self, name: str) -> list[float]:
        """The values of the steps that have one."""
        found = (result.metrics for result in self.results)
        return [metrics[name] for metrics in found if name in metrics]


def state(folder: Path, *groups: str) -> dict[str, Tensor]:
    return {f"{g}/{n}": value for g in groups for n, value in load_group(folder, g).items()}


async def test_the_optimizer_and_its_rate_begin_anew_after_the_warm_start(
    model_folder: Path, tmp_path: Path
) -> None:
    trial = Trial(model_folder, tmp_path / "all", configured({}, lr=5e-3))
    last = await trial.run(range(1, LAST + 1))
    # A course of each: two steps of warm-up, and what `linear` leaves of the third.
    assert trial.metric("policy/lr") == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-4, 1e-3, 1e-3])
    counts = {float(v) for n, v in load_group(last, "optimizer").items() if n.startswith("step.")}
    assert counts == {float(STEPS)}


async def test_the_steps_after_it_are_those_of_a_run_that_begins_with_its_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    kl = {"kl": {"coefficient": 0.05}, "proximal": "trainer", "mini_batches": 2}
    config = configured(kl)
    switch = await Trial(model_folder, tmp_path / "warm", config).run(range(1, WARM + 1))
    whole = Trial(model_folder, tmp_path / "whole", config)
    found = await whole.run(range(1, LAST + 1))
    # The optimizer, its rate and the reference of this one are all new.
    model = tmp_path / "model"
    export_model(switch, model_folder, policy_config(model_folder), model)
    own = config.model_copy(update={"warm_start": None})
    fresh = Trial(model, tmp_path / "fresh", own)
    expected = await fresh.run(range(1, STEPS + 1), first=WARM)
    assert same_bits(state(found, "model", "optimizer"), state(expected, "model", "optimizer"))
    for name in ("policy/loss", "policy/kl", "policy/lr", "policy/grad_norm"):
        assert whole.metric(name)[-STEPS:] == fresh.metric(name), name
    assert fresh.metric("policy/kl")[-1] > 0


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": {}},
    "everything": {"algorithm": EVERY},
    "adapters": {"algorithm": EVERY, "lora": True},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("stop", [WARM - 1, WARM, WARM + 1])
async def test_ranks_that_start_again_anywhere_end_with_the_same_bits(
    kind: str, stop: int, model_folder: Path, tmp_path: Path
) -> None:
    config = configured(**KINDS[kind])
    whole = Trial(model_folder, tmp_path / "whole", config)
    groups = ["adapters" if kind == "adapters" else "model", "optimizer"]
    groups += [] if kind == "plain" else ["critic", "reference"]
    expected = state(await whole.run(range(1, LAST + 1)), *groups)
    cut = await Trial(model_folder, tmp_path / "cut", config).run(range(1, stop + 1))
    assert bool(load_group(cut, "reference")) is (kind != "plain" and stop > WARM)
    resumed = Trial(model_folder, tmp_path / "resumed", config)
    found = state(await resumed.run(range(stop + 1, LAST + 1), cut), *groups)
    assert same_bits(found, expected)
    losses = resumed.metric("policy/loss")
    assert losses == whole.metric("policy/loss")[-len(losses) :]
    # The weights of policy.model are not checked where they are not used any more.
    assert resumed.info is not None
    assert (resumed.info.reference is None) is (
        kind == "plain" or (stop > WARM and not config.lora)
    )


async def test_a_reference_in_bfloat16_is_kept_as_it_was(
    model_folder: Path, tmp_path: Path
) -> None:
    config = configured({"kl": {"coefficient": 0.05}})
    cut = await Trial(model_folder, tmp_path / "cut", config, "bfloat16").run(range(1, WARM + 2))
    expected = load_group(cut, "reference")
    resumed = Trial(model_folder, tmp_path / "resumed", config, "bfloat16")
    found = load_group(await resumed.run(range(WARM + 2, LAST + 1), cut), "reference")
    assert same_bits(found, expected)
    # Matrices are rounded, as engines have them.
    matrix = expected["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(matrix, matrix.bfloat16().float())


async def test_what_the_penalty_measures_from_is_the_policy_after_the_warm_start(
    model_folder: Path, tmp_path: Path
) -> None:
    trial = Trial(model_folder, tmp_path / "all", configured({"kl": {"coefficient": 0.05}}))
    last = await trial.run(range(1, LAST + 1))
    switch = await Trial(model_folder, tmp_path / "cut", configured({})).run(range(1, WARM + 1))
    assert same_bits(load_group(last, "reference"), load_group(switch, "model"))
    # Nothing has left it before the first update that is not imitation.
    assert trial.metric("policy/kl")[0] == pytest.approx(0, abs=1e-7)
    assert trial.metric("policy/kl")[-1] > 1e-5
    assert len(trial.metric("policy/kl")) == STEPS


async def test_a_critic_learns_nothing_from_demonstrations_and_its_warm_up_counts_from_the_switch(
    model_folder: Path, tmp_path: Path
) -> None:
    config = configured(EVERY)
    start = await Trial(model_folder, tmp_path / "none", config).run(range(0))
    cut = await Trial(model_folder, tmp_path / "cut", config).run(range(1, WARM + 1))
    assert same_bits(load_group(cut, "critic"), load_group(start, "critic"))
    one = Trial(model_folder, tmp_path / "one", config)
    after = await one.run(range(1, WARM + 2))
    assert same_bits(load_group(after, "model"), load_group(cut, "model"))
    assert not same_bits(load_group(after, "critic"), load_group(cut, "critic"))


async def test_nothing_of_the_algorithm_reaches_the_steps_that_imitate(
    model_folder: Path, tmp_path: Path
) -> None:
    plain = Trial(model_folder, tmp_path / "plain", configured({}))
    other = Trial(model_folder, tmp_path / "other", configured(EVERY))
    saved = [await trial.run(range(1, WARM + 1)) for trial in (plain, other)]
    one, another = (load_group(folder, "model") for folder in saved)
    assert same_bits(one, another)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["everything", "adapters"])
async def test_two_ranks_with_a_part_each_make_the_same_steps_as_one(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    alone = Trial(model_folder, tmp_path / "alone", configured(**KINDS[kind]))
    await alone.run(range(1, LAST + 1))
    both = configured(**KINDS[kind], processes=2)
    cut = Trial(model_folder, tmp_path / "cut", both)
    saved = await cut.run(range(1, WARM + 2))
    rest = Trial(model_folder, tmp_path / "rest", both)
    await rest.run(range(WARM + 2, LAST + 1), saved)
    for name in ("policy/loss", "policy/grad_norm", "policy/kl"):
        found = [*cut.metric(name), *rest.metric(name)]
        assert found == pytest.approx(alone.metric(name), abs=1e-5, nan_ok=True), name
