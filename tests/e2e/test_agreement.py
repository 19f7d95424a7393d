"""Engine and trainer agree about a model as large ones are: GQA, a head of its own, YaRN."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import RankPlacement
from flotilla_learner.rank.model import Policy, score_tokens
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.worker import FirstRank
from flotilla_learner.ranks import protocol
from flotilla_learner.types import TrainBatch, TrainSequence
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.types import Completion, Publication, Sampling
from tests.e2e.wide_model import VOCAB, policy_section
from tests.support.tiny_model import make_sparse_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

Dtype = Literal["float32", "bfloat16"]

ORIGINAL_POSITIONS = 256
GENERATED = 190
# Nearly all that is sampled lies beyond the positions that the model was trained with.
GIVEN = np.random.default_rng(0).integers(0, VOCAB, 440).astype(np.int32)
PROMPT = GIVEN[:-GENERATED]
TURN_END = VOCAB - 1
ATTEMPTS = 4


@contextmanager
def ranked(policy: PolicyConfig, folder: Path) -> Generator[tuple[FirstRank, Policy]]:
    """A training rank in this process, with steps large enough to be seen in bfloat16."""
    setup = RankSetup(
        name="agreement",
        shm_dir=folder,
        total_steps=1,
        policy=policy,
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=1e-2),
        rank=RankConfig(),
        place=RankPlacement(index=0, count=1, rendezvous=f"file://{folder}/ranks", slot=0, slots=1),
    )
    models = load_models(setup)
    rank = FirstRank(setup, models)
    try:
        yield rank, models.policy
    finally:
        rank.close()


def announced(rank: FirstRank, version: int) -> Publication:
    """A publication of the rank as a rollout worker receives it."""
    made = protocol.decode_publication(rank.publish_weights({"version": version}))
    return Publication(
        policy=PolicyId(1, version, made.fingerprint),
        manifest=made.manifest,
        total_bytes=made.total_bytes,
        transport="shm",
        location=str(made.path),
        canary_token_ids=made.canary_token_ids,
        timeout_s=10.0,
    )


def trained_on(completions: list[Completion]) -> TrainBatch:
    """One step on what was sampled, half of it rewarded."""
    return TrainBatch(
        1,
        tuple(
            TrainSequence(
                group_id="g",
                attempt_index=index,
                reward=float(index % 2),
                token_ids=whole(sampled),
                policy_mask=np.arange(len(whole(sampled))) >= len(PROMPT),
                behaviour_logprobs=np.pad(sampled.logprobs, (len(PROMPT), 0)),
                temperature=1.0,
                staleness=0,
            )
            for index, sampled in enumerate(completions)
        ),
    )


def whole(sampled: Completion) -> NDArray[np.int32]:
    return np.concatenate([PROMPT, sampled.token_ids])


def of_trainer(policy: Policy, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    return score_tokens(policy, token_ids, chunk=512)


async def sampled_and_checked(
    engine: VllmEngine, policy: Policy, tolerance: float
) -> list[Completion]:
    """Check that engine and trainer agree, about given tokens and about sampled ones."""
    given = np.abs(await engine.compute_logprobs(GIVEN) - of_trainer(policy, GIVEN))
    assert given[:ORIGINAL_POSITIONS].max() < tolerance
    assert given[ORIGINAL_POSITIONS:].max() < tolerance
    requests = [
        engine.generate(PROMPT, Sampling(1.0, seed=seed), GENERATED) for seed in range(ATTEMPTS)
    ]
    completions = await asyncio.gather(*requests)
    for sampled in completions:
        trainer = of_trainer(policy, whole(sampled))[len(PROMPT) - 1 :]
        assert np.abs(sampled.logprobs - trainer).max() < tolerance
    assert max(len(sampled.token_ids) for sampled in completions) > 50
    return completions


# test_training.py compares engine and trainer too, after each step of a run of a smaller model.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.25)])
async def test_engine_and_trainer_agree_before_and_after_a_step(
    dtype: Dtype, tolerance: float, wide_folder: Path, tmp_path: Path
) -> None:
    config = EngineConfig(device="cpu", max_num_seqs=ATTEMPTS)
    await check_agreement(policy_section(wide_folder, dtype), config, tolerance, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_engine_and_trainer_agree_about_experts_before_and_after_a_step(
    workers: int, tmp_path: Path
) -> None:
    """Also where each of two workers has a part of every expert."""
    make_sparse_model(tmp_path / "model", vocab_size=VOCAB)
    policy = PolicyConfig(model=str(tmp_path / "model"), dtype="float32", max_model_len=1024)
    config = EngineConfig(device="cpu", max_num_seqs=ATTEMPTS, tensor_parallel=workers)
    await check_agreement(policy, config, 1e-4, tmp_path)


async def check_agreement(
    policy: PolicyConfig, config: EngineConfig, tolerance: float, tmp_path: Path
) -> None:
    """Check an engine against a rank at the weights of its folder, and after a step of the rank."""
    model = ServedModel(Path(policy.model), policy, [TURN_END])
    engine = await VllmEngine.start_engine(config, model)
    try:
        with ranked(policy, tmp_path) as (rank, trained):
            first = announced(rank, 0)
            await engine.load_weights(first, Path(first.location))
            completions = await sampled_and_checked(engine, trained, tolerance)
            before = of_trainer(trained, GIVEN)
            rank.train_step(
                protocol.write_batch(tmp_path / "batch.safetensors", trained_on(completions))
            )
            after = of_trainer(trained, GIVEN)
            assert np.abs(after - before).mean() > tolerance, "the step changed too little"
            second = announced(rank, 1)
            await engine.load_weights(second, Path(second.location))
            await sampled_and_checked(engine, trained, tolerance)
    finally:
        await engine.close()


def test_the_scaling_reaches_every_position(wide_folder: Path) -> None:
    """Were it ignored on both sides, they would agree as well."""
    policy = policy_section(wide_folder, "float32")
    plain = policy.model_copy(update={"rope_scaling": None})
    with torch.no_grad():
        scaled, unscaled = (
            of_trainer(load_policy(p, RankConfig()), GIVEN) for p in (policy, plain)
        )
    assert np.abs(scaled - unscaled)[ORIGINAL_POSITIONS:].mean() > 0.01
