"""Engine and trainer agree about tokens sampled with top_k and top_p, update after update: the
trainer scores each among the engine's candidates. Scored among all tokens, the guard refuses
them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.trajectory import Counts, Trajectory, content_digest
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.guard import GuardConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.guard.mismatch_limits import Excess, bound_of
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.score_comparison import ScoreComparer
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, VersionMismatch
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.types import Sampling
from tests.support.tiny_model import VOCAB, make_model, publish
from tests.support.tiny_ranks import changed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

PROMPT = np.random.default_rng(0).integers(3, VOCAB, 48).astype(np.int32)
OBSERVED = list(range(100, 120))
TOP_K, TOP_P, TEMPERATURE = 40, 0.9, 0.8
UPDATES, GROUPS, SIZE, GENERATED = 10, 3, 8, 32
RANK = RankConfig(head_chunk=100, pack_tokens=512)
ALGORITHM: dict[str, Any] = {"proximal": "trainer", "kl": {"coefficient": 0.05}}


async def play(engine: VllmEngine, seed: int, top_p: float) -> Trajectory:
    """Play two turns; the reward is drawn."""
    transcript, counts = Transcript(PROMPT), Counts()
    for turn in range(2):
        sampling = Sampling(TEMPERATURE, seed, top_p, TOP_K)
        written = await engine.generate(transcript.for_engine(), sampling, GENERATED)
        assert written.candidates is not None
        assert (written.candidates == written.token_ids[:, None]).any(1).all()
        counts.mended_candidates += written.mended
        transcript.add_completion(written, TEMPERATURE)
        if turn == 0:
            transcript.add_observation(OBSERVED)
    key = AttemptKey(f"g{seed % GROUPS}", seed, 0)
    held, reward = (transcript.sequence,), float(np.random.default_rng(seed).integers(2))
    ended: dict[str, Any] = {"stop_reason": StopReason.MAX_TURNS, "counts": counts}
    return Trajectory(key, "", held, content_digest(held), reward, **ended)


async def play_all(engine: VllmEngine, step: int, top_p: float = TOP_P) -> list[Trajectory]:
    seeds = range(step * 1000, step * 1000 + GROUPS * SIZE)
    played = await asyncio.gather(*(play(engine, seed, top_p) for seed in seeds))
    return sorted(played, key=lambda one: one.key.group_id)


def compare(policy: Policy, batch: TrainBatch) -> VersionMismatch:
    """Compare as the guard does."""
    slots: Any = SimpleNamespace(versions=())
    return ScoreComparer(policy, slots, RANK, None).compare_batch(batch).versions[batch.step - 1]


def excesses(found: VersionMismatch, dtype: str = "float32") -> tuple[Excess, ...]:
    return bound_of(GuardConfig(), dtype).find_excesses(0, found)


@asynccontextmanager
async def started(folder: Path, dtype: str) -> AsyncGenerator[tuple[VllmEngine, Policy]]:
    """Start an engine and a trainer's policy on a new model."""
    make_model(folder)
    given = {"model": str(folder), "dtype": dtype, "max_model_len": 256}
    config = PolicyConfig.model_validate(given)
    served = ServedModel(folder, config, [VOCAB - 1])
    engine = await VllmEngine.start_engine(EngineConfig(device="cpu", max_num_seqs=24), served)
    try:
        yield engine, load_policy(config, RANK)
    finally:
        await engine.close()


async def serve(engine: VllmEngine, policy: Policy, folder: Path, version: int) -> None:
    """Have the engine serve the policy's present weights."""
    update = publish(policy.model, folder / f"{version}.safetensors", version)
    await engine.load_weights(update, Path(update.location))


async def test_engine_and_trainer_agree_over_ten_updates(tmp_path: Path) -> None:
    async with started(tmp_path, "float32") as (engine, policy):
        optimizer = Optimizer(policy.trained_parameters(), OptimizerConfig(lr=1e-3))
        trainer = Trainer(policy, optimizer, AlgorithmConfig.model_validate(ALGORITHM), RANK)
        for version in range(UPDATES + 1):
            await serve(engine, policy, tmp_path, version)
            played = await play_all(engine, version + 1)
            assert not any(each.counts.mended_candidates for each in played)
            batch = build_train_batch(version + 1, played)
            check_batch(policy, batch)
            if version < UPDATES:
                check_update(trainer.train_step(batch, 1e-3).metrics)


async def test_in_bfloat16_the_guard_takes_what_top_k_alone_has_left(tmp_path: Path) -> None:
    """Logits tie there now and then: test_vllm_logprobs.py has what is then mended."""
    async with started(tmp_path, "bfloat16") as (engine, policy):
        await serve(engine, policy, tmp_path, 0)
        played = await play_all(engine, 1, top_p=1.0)
        mended = sum(each.counts.mended_candidates for each in played)
        batch = build_train_batch(1, played)
        found, without = compare(policy, batch), compare(policy, changed(batch, candidates=None))
        print(f"mended {mended} of {found.tokens}: {found}; without candidates {without}")
        assert mended < 0.1 * found.tokens
        assert not excesses(found, "bfloat16")
        assert excesses(without, "bfloat16")


def check_batch(policy: Policy, batch: TrainBatch) -> None:
    """Check the samples of the policy's present weights."""
    kept = np.concatenate([each.candidates for each in batch.sequences])  # pyright: ignore[reportCallIssue, reportArgumentType]
    counts = (kept >= 0).sum(1)
    found, without = compare(policy, batch), compare(policy, changed(batch, candidates=None))
    print(
        f"version {batch.step - 1}: {len(kept)} tokens of {counts.mean():.1f} candidates,"
        f" at most {counts.max()}: mean {found.abs_diff:.1e}, max {found.abs_diff_max:.1e};"
        f" without them mean {without.abs_diff:.2g}"
    )
    assert 1 < counts.mean() < counts.max() <= TOP_K
    assert found.abs_diff_max < 1e-4
    assert not excesses(found)
    assert {each.statistic for each in excesses(without)} == {"mean", "tail", "kl"}
    # One candidate too many is enough.
    more = [replace(each, candidates=extended(each.candidates)) for each in batch.sequences]
    assert excesses(compare(policy, replace(batch, sequences=tuple(more))))


def extended(candidates: np.ndarray | None) -> np.ndarray:
    """Add a token to the candidates of those that leave room."""
    assert candidates is not None
    more = candidates.copy()
    room = (more[:, -1] < 0) & ~(more == VOCAB - 2).any(1)
    more[room, -1] = VOCAB - 2
    return more


def check_update(metrics: Any) -> None:
    assert metrics["policy/post_update_kl"] > 1e-6
    assert metrics["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert 0 < metrics["policy/entropy"] < np.log(TOP_K)
