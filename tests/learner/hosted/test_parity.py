"""A step at a service is the step of our own ranks: real arithmetic on both sides."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc import rpc
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.hosted.adapters.tinker_trainer import TinkerTrainer
from flotilla_learner.hosted.hosted_ranks import HostedRanks, HostedSite
from flotilla_learner.hosted.step_book import StepBook
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.model import score_tokens
from flotilla_tinker.adapters.training_peer import GrpcTrainingPeer
from tests.learner.hosted.hosted_runs import (
    VOCABULARY,
    learner_config,
    policy_config,
    train_batch,
)
from tests.support.tinker_front import serving_front
from tests.support.tiny_ranks import make_trainer
from tests.support.training_process import TOKEN, training_process
from tests.tinker.work.desk_doubles import ScriptedEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
SEED, RANK, STEPS = 7, 4, (1, 2)
# Adam divides a gradient by its own size, rounding errors too; hardly with this eps.
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "grad_clip": 0.05}
# A token more or less on the good side of a clip would be a visible difference.
CLOSE = 2e-4


@pytest.fixture
async def service_url(tmp_path: Path, model_folder: Path) -> AsyncGenerator[str]:
    """A front door over a real training service."""
    folder = tmp_path / "service"
    folder.mkdir()
    async with training_process(folder, model_folder) as process:
        address = process.address
        async with (
            rpc.channel(address, token=TOKEN, timeout_s=600) as channel,
            serving_front(tmp_path / "front", GrpcTrainingPeer(channel), ScriptedEngine()) as url,
        ):
            yield url


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "ppo_clip", "epochs": 2, "mini_batches": 2},
        pytest.param({"loss": "gspo", "reduction": "sequence_mean"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "loss": "cispo",
                "advantage": "dr_grpo",
                "reduction": "sequence_mean_token_sum_norm",
                "norm_tokens": 50,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"loss": "importance_sampling", "advantage": "rloo"}, marks=pytest.mark.slow),
    ],
)
async def test_a_service_makes_the_steps_of_own_ranks(
    service_url: str, tmp_path: Path, model_folder: Path, algorithm: dict[str, object]
) -> None:
    config = learner_config(algorithm=algorithm, optimizer=OPTIMIZER, lora={"rank": RANK})
    policy_settings = policy_config(service_url, model=str(model_folder))
    site = HostedSite("run", tmp_path, policy_settings, VOCABULARY)
    service = TinkerTrainer(policy_settings.tinker, site.base_model, RANK, SEED, "run")
    ranks = HostedRanks(site, config, service, StepBook(tmp_path, "run"))
    policy, _, trainer = make_trainer(
        model_folder, algorithm=config.algorithm, lora=LoraConfig(rank=RANK), **OPTIMIZER
    )
    assert policy.adapters is not None
    policy.adapters.reset(seed=SEED)
    await ranks.start_ranks(None)
    ids = canary_token_ids(VOCABULARY)
    before = score_tokens(policy, ids, chunk=16)
    for step in STEPS:
        batch = train_batch(step)
        own, found = trainer.train_step(batch, 1e-2), await ranks.train_step(batch)
        for name in ("policy/loss", "policy/grad_norm", "policy/updates", "policy/lr"):
            assert found.metrics[name] == pytest.approx(own.metrics[name], rel=1e-3, abs=1e-5)
        for name in (each for each in own.metrics if each.startswith("mismatch/")):
            if name in found.metrics:
                assert found.metrics[name] == pytest.approx(own.metrics[name], rel=1e-3, abs=1e-4)
        assert found.tokens is not None
        assert own.tokens is not None
        assert found.tokens.standings == own.tokens.standings
        for one, other in zip(found.tokens.logprobs, own.tokens.logprobs, strict=True):
            assert one == pytest.approx(other, abs=CLOSE, nan_ok=True)
        assert found.versions.keys() == own.versions.keys()
    published = await ranks.publish_weights(STEPS[-1])
    after = score_tokens(policy, ids, chunk=16)
    assert published.canary_token_ids.tolist() == ids.tolist()
    assert np.abs(after - before).max() > 100 * CLOSE
    assert published.canary_logprobs == pytest.approx(after, abs=CLOSE)
    await ranks.close()
