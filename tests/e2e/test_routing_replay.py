"""Engine and trainer agree better about a mixture of experts where the trainer uses the engine's
experts: in bfloat16 each side rounds on its own, and choices that are close fall otherwise."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.types import Completion, Publication, Sampling
from tests.support.tiny_model import VOCAB, make_sparse_model, publish

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

PROMPT = np.random.default_rng(0).integers(3, VOCAB, 96).astype(np.int32)
ATTEMPTS, GENERATED = 24, 96


async def sample_rows(policy: PolicyConfig, update: Publication) -> list[Row]:
    """Return what an engine samples, with the experts that it names."""
    model = Path(policy.model)
    config = EngineConfig(device="cpu", max_num_seqs=ATTEMPTS)
    engine = await VllmEngine.start_engine(config, ServedModel(model, policy, [VOCAB - 1]))
    try:
        await engine.load_weights(update, Path(update.location))
        requests = [engine.generate(PROMPT, Sampling(1.0, i), GENERATED) for i in range(ATTEMPTS)]
        written = await asyncio.gather(*requests)
    finally:
        await engine.close()
    return [make_row(index, one) for index, one in enumerate(written)]


def make_row(index: int, written: Completion) -> Row:
    ids = np.concatenate([PROMPT, written.token_ids])
    positions = np.arange(len(PROMPT) - 1, len(ids) - 1)
    return Row(index, ids, positions, written.logprobs, 1.0, 0, written.experts)


def differences(policy: PolicyConfig, rows: list[Row]) -> np.ndarray:
    """Return by how much engine and trainer differ about each token."""
    trained = load_policy(policy, RankConfig())
    scores = score_rows(trained, rows, RowPacker(trained, 4096, Replicas()), chunk=512)
    return np.concatenate([np.abs(scores[row.index] - row.behaviour) for row in rows])


async def test_replay_takes_away_what_other_experts_make_of_a_logprob(tmp_path: Path) -> None:
    model = make_sparse_model(
        tmp_path / "model",
        num_hidden_layers=6,
        num_experts=32,
        num_experts_per_tok=4,
        mlp_only_layers=[],
    )
    policies = [
        PolicyConfig.model_validate(
            {
                "model": str(tmp_path / "model"),
                "dtype": "bfloat16",
                "max_model_len": 256,
                "routing_replay": mode,
            }
        )
        for mode in ("measure", "replay")
    ]
    update = publish(model, tmp_path / "0.safetensors", 0)
    rows = await sample_rows(policies[0], update)
    measured, replayed = (differences(policy, rows) for policy in policies)
    print(f"mean {measured.mean():.4f}, with replay {replayed.mean():.4f};", end=" ")
    print(f"largest {measured.max():.4f}, with replay {replayed.max():.4f}")
    assert replayed.mean() < 0.25 * measured.mean()
