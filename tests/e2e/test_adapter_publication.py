"""Adapters that a rank trains are published alone, and a live engine serves the policy that the
rank computes with, or none."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc import rpc
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.guard.mismatch_limits import BOUNDS
from flotilla_learner.rank.model import score_tokens
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.types import Publication as Announced
from flotilla_learner.weights.attached_worker import AttachedWorker
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_broadcast import Announcement, WeightBroadcast
from flotilla_learner.weights.weight_server import WeightServerConfig
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.policy_feed import PolicyClient
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine, EngineDead, PolicyFeed
from flotilla_rollout.types import Completion, Publication, Sampling
from flotilla_rollout.work.weight_staging import FingerprintMismatch, stage_weights
from tests.support.adapted_learner import RANK, AdaptedLearner, damaged, logprobs_across
from tests.support.multimodal_models import make_multimodal
from tests.support.tiny_model import load_model, make_kind, perturbed, reference_logprobs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

TOKEN = "a-token-of-this-test"
TOLERANCE = 1e-4
PROMPT = np.arange(3, 67, dtype=np.int32)
# Ends a turn practically never.
NEVER = 383
# Pauses until a turn has begun and not ended: the speed of this machine is unknown.
PAUSES_S = (0.3, 0.1, 0.6, 0.03, 1.2, 0.01, 2.4)


@asynccontextmanager
async def serving(folder: Path, workers: int = 1, **policy: Any) -> AsyncGenerator[Engine]:
    shared = {"model": str(folder), "dtype": "float32", "max_model_len": 1024}
    config = PolicyConfig.model_validate({**shared, "adapter_rank": RANK, **policy})
    options = EngineConfig(device="cpu", max_num_seqs=16, tensor_parallel=workers)
    engine = await start_engines(options, ServedModel(folder, config, [NEVER]))
    try:
        yield engine
    finally:
        await engine.close()


async def load(engine: Engine, update: Publication) -> None:
    await engine.load_weights(update, Path(update.location))


async def canary_error(engine: Engine, learner: AdaptedLearner, update: Publication) -> float:
    assert engine.policy == update.policy
    scored = await engine.compute_logprobs(update.canary_token_ids)
    return float(np.abs(scored - learner.canary).max())


@dataclass(frozen=True, slots=True)
class SwitchedTurn:
    """A turn during which adapters were loaded, and the policies before and after."""

    before: PolicyId | None
    after: PolicyId
    old: PreTrainedModel
    written: Completion


async def switch_in_a_turn(engine: Engine, learner: AdaptedLearner) -> SwitchedTurn:
    for pause_s in PAUSES_S:
        old, before = learner.merged_model(), engine.policy
        update = learner.train_and_publish()
        turn = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 1), 400))
        await asyncio.sleep(pause_s)
        await load(engine, update)
        found = SwitchedTurn(before, update.policy, old, await turn)
        if len(found.written.spans) == 2:
            return found
    raise AssertionError("no turn was under way")


async def check_switch_in_a_turn(engine: Engine, learner: AdaptedLearner) -> None:
    """A turn under way continues with the next adapters, to the very token."""
    turn = await switch_in_a_turn(engine, learner)
    old, written = turn.old, turn.written
    assert [span.policy for span in written.spans] == [turn.before, turn.after]
    ids = np.concatenate([PROMPT, written.token_ids])
    switch = len(PROMPT) + written.spans[0].length
    across = logprobs_across(old, learner.merged_model(), ids, switch)[len(PROMPT) - 1 :]
    assert float(np.abs(written.logprobs - across).max()) < TOLERANCE
    alone = reference_logprobs(old, ids)[len(PROMPT) - 1 :]
    assert float(np.abs(written.logprobs - alone)[written.spans[0].length :].max()) > 0.01


async def check_damage_is_refused(engine: Engine, learner: AdaptedLearner, folder: Path) -> None:
    """Adapters with a flipped bit never reach the engine, which keeps serving."""
    served, expected = engine.policy, learner.canary
    update = damaged(learner.train_and_publish(), folder)
    with pytest.raises(FingerprintMismatch):
        await stage_weights(update, no_feed(), folder / "staged")
    assert engine.policy == served
    scored = await engine.compute_logprobs(update.canary_token_ids)
    assert float(np.abs(scored - expected).max()) < TOLERANCE


def no_feed() -> PolicyFeed:
    """A feed for tests that fetch nothing."""
    return None  # pyright: ignore[reportReturnType]


async def check_another_base_is_noticed(engine: Engine, folder: Path, scratch: Path) -> None:
    """The learner refuses an engine that has loaded another model than its adapters belong to."""
    perturbed(load_model(folder), 1).save_pretrained(scratch / "other")
    learner = AdaptedLearner(scratch / "other", scratch / "other-shm")
    update = learner.publish()
    await load(engine, update)
    scored = await engine.compute_logprobs(update.canary_token_ids)
    judge = WeightBroadcast(canary_tolerance=BOUNDS["float32"].tail, attach_grace_s=1.0)
    judge.attach_worker(AttachedWorker("w", "i", 1, shares_memory=True, can_fetch=False))
    fields = (update.policy.fingerprint, update.manifest, update.total_bytes)
    path, ids = Path(update.location), update.canary_token_ids
    announced = Announced(update.policy.version, *fields, path, ids, learner.canary)
    judge.announce_policy(Announcement(update.policy, announced))
    assert not judge.verify_canary("w", update.policy, scored)
    assert judge.verify_canary("w", update.policy, learner.canary)


async def check_updates(engine: Engine, learner: AdaptedLearner, updates: int) -> None:
    """Each is served as the rank computes it, and is another policy than the first."""
    first = learner.publish()
    await load(engine, first)
    before = learner.canary
    assert await canary_error(engine, learner, first) < TOLERANCE
    for _ in range(updates):
        update = learner.train_and_publish()
        await load(engine, update)
        assert await canary_error(engine, learner, update) < TOLERANCE
    assert float(np.abs(learner.canary - before).max()) > 0.01


async def check_layer_that_is_not_there(engine: Engine, learner: AdaptedLearner) -> None:
    """Adapters that the engine cannot serve whole end it."""
    update = learner.train_and_publish()
    manifest = [
        replace(entry, name=entry.name.replace(".q_proj.", ".other_proj."))
        for entry in update.manifest
    ]
    with pytest.raises(EngineDead, match=r"of 14 layers with an adapter the engine has 12"):
        await load(engine, replace(update, manifest=tuple(manifest)))
    assert engine.policy is None


@pytest.mark.slow
async def test_an_engine_serves_the_adapters_that_were_published_last(
    engine_folder: Path, tmp_path: Path
) -> None:
    learner = AdaptedLearner(engine_folder, tmp_path / "shm")
    async with serving(engine_folder) as engine:
        await check_updates(engine, learner, 2)
        await check_switch_in_a_turn(engine, learner)
        await check_damage_is_refused(engine, learner, tmp_path)
        await check_another_base_is_noticed(engine, engine_folder, tmp_path)
        await check_layer_that_is_not_there(engine, learner)


@pytest.mark.slow
async def test_an_engine_that_starts_late_serves_as_those_do_that_had_every_publication(
    engine_folder: Path, tmp_path: Path
) -> None:
    """It has the base from the model's files, and of the adapters the newest alone."""
    learner = AdaptedLearner(engine_folder, tmp_path / "shm")
    async with serving(engine_folder) as early:
        await check_updates(early, learner, 3)
        newest = learner.publish()
        async with serving(engine_folder) as late:
            assert late.policy is None
            await load_fetched(late, newest, tmp_path)
            assert await canary_error(late, learner, newest) < TOLERANCE
            ids = np.random.default_rng(0).integers(3, 300, 512).astype(np.int32)
            theirs, its = [await each.compute_logprobs(ids) for each in (early, late)]
            assert float(np.abs(theirs - its).max()) < TOLERANCE
            expected = reference_logprobs(learner.merged_model(), ids)
            assert float(np.abs(its - expected).max()) < TOLERANCE
            await check_switch_in_a_turn(late, learner)


async def load_fetched(engine: Engine, update: Publication, folder: Path) -> None:
    """Load a publication as a worker of another machine does: by WeightService."""
    server = PublicationChild("flotilla_learner.weights.weight_server", folder / "weights.log")
    try:
        address = await server.start_process(WeightServerConfig("run", TOKEN))
        path, nothing = Path(update.location), np.zeros(0, np.float32)
        fields = (update.policy.fingerprint, update.manifest, update.total_bytes)
        ids = update.canary_token_ids
        written = Announced(update.policy.version, *fields, path, ids, nothing)
        await server.serve_publication(written, update.policy)
        open_channel = partial(rpc.channel, token=TOKEN)
        async with open_channel(address) as channel:
            identity = WorkerIdentity("late", "incarnation", 1, TokenizerDigests(b"d" * 32))
            feed = PolicyClient(channel, identity, RunEpoch(), weights=open_channel)
            sent = replace(update, transport="grpc", location=address)
            await stage_weights(sent, feed, folder / "staged")
            await engine.load_weights(sent, folder / "staged")
    finally:
        await server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tied", "workers"),
    [
        (Qwen2Config, True, 1),
        (Qwen3Config, False, 2),
        (LlamaConfig, False, 1),
        (LlamaConfig, True, 2),
    ],
)
async def test_ten_updates_of_each_architecture_are_served_as_the_rank_computes_them(
    kind: type[PreTrainedConfig], tied: bool, workers: int, tmp_path: Path
) -> None:
    make_kind(tmp_path / "model", kind, tied=tied)
    learner = AdaptedLearner(tmp_path / "model", tmp_path / "shm")
    async with serving(tmp_path / "model", workers) as engine:
        await check_updates(engine, learner, 10)
        await check_switch_in_a_turn(engine, learner)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl"])
async def test_those_of_a_multimodal_models_text_part_are_served_as_the_rank_computes_them(
    kind: str, tmp_path: Path
) -> None:
    make_multimodal(tmp_path / "model", kind)
    learner = AdaptedLearner(tmp_path / "model", tmp_path / "shm")
    async with serving(tmp_path / "model") as engine:
        await check_updates(engine, learner, 1)


@pytest.mark.slow
async def test_in_bfloat16_the_trainer_computes_as_the_engine_does(
    engine_folder: Path, tmp_path: Path
) -> None:
    """Nearer than with merged weights, into which most of a small update rounds away."""
    learner = AdaptedLearner(engine_folder, tmp_path / "shm", dtype="bfloat16")
    async with serving(engine_folder, dtype="bfloat16") as engine:
        for _ in range(3):
            learner.train()
        update = learner.publish()
        await load(engine, update)
        ids = np.random.default_rng(0).integers(3, 300, 512).astype(np.int32)
        sampled = await engine.compute_logprobs(ids)
    policy = learner.models.policy
    separate = score_tokens(policy, ids, chunk=512)
    merged = load_policy(
        learner.setup.policy.model_copy(update={"adapter_rank": None}),
        learner.setup.rank,
        lora=learner.setup.lora,
    )
    with torch.no_grad():
        for name, parameter in merged.trained_parameters().items():
            parameter.copy_(policy.trained_parameters()[name])
    off, further = (
        float(np.abs(sampled - scored).mean())
        for scored in (separate, score_tokens(merged, ids, chunk=512))
    )
    print(f"mean difference from the engine: {off:.5f}; of merged weights {further:.5f}")
    assert off < further
