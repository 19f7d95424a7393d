"""The guard on vLLM: an engine that is set up as the trainer passes, and each fault is named."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.guard.diagnosis import Diagnosis, diagnose_mismatch
from flotilla_learner.guard.mismatch_limits import BOUNDS
from flotilla_learner.guard.probes import ProbeResult, probe_batch, start_probes
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import Comparison
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.types import Publication, Sampling
from tests.e2e.wide_model import VOCAB, policy_section

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

ORIGINAL_POSITIONS = 256
# As much as the model has without its scaling.
LENGTH = 320
TEMPERATURE = 0.7


def section(folder: Path, dtype: Literal["float32", "bfloat16"], *, yarn: bool) -> PolicyConfig:
    """Return the policy section, with YaRN or without, for the same length."""
    policy = policy_section(folder, dtype).model_copy(update={"max_model_len": LENGTH})
    return policy if yarn else policy.model_copy(update={"rope_scaling": None})


@asynccontextmanager
async def engine_of(served: PolicyConfig, folder: Path) -> AsyncGenerator[VllmEngine]:
    """vLLM with the weights of the model, as version 0."""
    made = ServedModel(Path(served.model), served, [VOCAB - 1])
    engine = await VllmEngine.start_engine(EngineConfig(device="cpu", max_num_seqs=8), made)
    policy = load_policy(served, RankConfig())
    slots = WeightSlots(policy.named_parameters(), policy.compute_dtype, folder, "engine")
    try:
        path, fingerprint, manifest = slots.write_version(0)
        publication = Publication(
            policy=PolicyId(1, 0, fingerprint),
            manifest=manifest,
            total_bytes=slots.total_bytes,
            transport="shm",
            location=str(path),
            canary_token_ids=start_probes(served, VOCAB, 1.0)[0].prompt_token_ids,
            timeout_s=10.0,
        )
        await engine.load_weights(publication, path)
        # A learner orders this of a worker whose engine is not to be trusted.
        await engine.load_weights(replace(publication, reload=True), path)
        yield engine
    finally:
        slots.unlink_slots()
        await engine.close()


class Trainer:
    """A rank with the same weights, and what it finds of an engine's answers to its probes."""

    def __init__(self, config: PolicyConfig, folder: Path) -> None:
        self.config = config
        policy: Policy = load_policy(config, RankConfig())
        slots = WeightSlots(policy.named_parameters(), policy.compute_dtype, folder, "trainer")
        self._comparing = CompareCommand(policy, slots, config, RankConfig())

    async def compares(self, engine: VllmEngine, *, sampled_at: float = TEMPERATURE) -> Comparison:
        """Compare probes of an engine that samples at `sampled_at` instead of TEMPERATURE."""
        probes = start_probes(self.config, VOCAB, TEMPERATURE)
        answers: Sequence[ProbeResult] = [
            ProbeResult(sampled.token_ids, sampled.logprobs)
            for sampled in [
                await engine.generate(
                    probe.prompt_token_ids, Sampling(sampled_at, probe.seed), probe.max_tokens
                )
                for probe in probes
            ]
        ]
        return self._comparing.run_comparison(probe_batch(0, probes, answers), 0, diagnose=True)

    async def agrees(self, engine: VllmEngine) -> Comparison:
        comparison = await self.compares(engine)
        assert not BOUNDS[self.config.dtype].find_excesses(0, comparison.versions[0])
        return comparison

    async def names(self, engine: VllmEngine, *, sampled_at: float = TEMPERATURE) -> Diagnosis:
        comparison = await self.compares(engine, sampled_at=sampled_at)
        found = comparison.versions[0]
        assert BOUNDS[self.config.dtype].find_excesses(0, found)
        return diagnose_mismatch(found, comparison, self.config, TEMPERATURE)


async def test_an_engine_without_the_scaling_and_one_at_another_temperature_are_named(
    wide_folder: Path, tmp_path: Path
) -> None:
    same = Trainer(section(wide_folder, "float32", yarn=False), tmp_path)
    stretched = Trainer(section(wide_folder, "float32", yarn=True), tmp_path)
    async with engine_of(same.config, tmp_path) as engine:
        await same.agrees(engine)
        temperature = await same.names(engine, sampled_at=1.0)
        assert temperature.setting == "temperature"
        assert "those of 1, learner.temperature is 0.7" in temperature.sentence
        rope = await stretched.names(engine)
        assert rope.setting == "rope"
        assert "without policy.rope_scaling" in rope.sentence


async def test_with_yarn_an_engine_agrees_beyond_the_original_context_and_its_dtype_is_named(
    wide_folder: Path, tmp_path: Path
) -> None:
    same = Trainer(section(wide_folder, "bfloat16", yarn=True), tmp_path)
    finer = Trainer(section(wide_folder, "float32", yarn=True), tmp_path)
    async with engine_of(same.config, tmp_path) as engine:
        bands = (await same.agrees(engine)).bands
        assert bands[-1].start == ORIGINAL_POSITIONS
        assert bands[-1].abs_diff < BOUNDS["bfloat16"].mean
        dtype = await finer.names(engine)
        assert dtype.setting == "dtype"
        assert "computing in bfloat16" in dtype.sentence
