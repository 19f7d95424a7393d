"""Our engine and our hosted ranks on SkyRL's server."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import TinkerConfig
from flotilla_common.weights.sampler_reference import read_reference
from flotilla_learner.hosted.hosted_ranks import HostedRanks
from flotilla_learner.hosted.step_book import FOLDER
from flotilla_learner.types import Publication as Published
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
from flotilla_rollout.types import Publication, Sampling
from flotilla_rollout.work.service_use import ServiceUse
from tests.learner.hosted.hosted_runs import started, train_batch

pytestmark = [
    pytest.mark.skyrl,
    # The server compiles at each first call.
    pytest.mark.timeout(1800),
    # The client's threads and connections.
    pytest.mark.filterwarnings("ignore"),
]
STOP_ID = 2
PROMPT = np.arange(40, 60, dtype=np.int32)
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-nobody-checks-it")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@asynccontextmanager
async def engine_on(url: str) -> AsyncGenerator[TinkerEngine]:
    engine = await TinkerEngine.start_engine(TinkerConfig(url=url), "run", [STOP_ID], ServiceUse())
    try:
        yield engine
    finally:
        await engine.close()


async def serve(engine: TinkerEngine, published: Published) -> NDArray[np.float32]:
    """Have the engine load what the ranks have published; return its scores of the canary."""
    policy = PolicyId(1, published.version)
    ids, size, path = published.canary_token_ids, published.total_bytes, published.path
    announced = Publication(policy, published.manifest, size, "shared_memory", str(path), ids, 20.0)
    await engine.load_weights(announced, path)
    return await engine.compute_logprobs(ids)


async def train_to(ranks: HostedRanks, step: int) -> Published:
    await ranks.train_step(train_batch(step))
    return await ranks.publish_weights(step)


async def test_a_step_reaches_the_engine(skyrl_url: str, tmp_path: Path) -> None:
    async with started(tmp_path, skyrl_url) as ranks, engine_on(skyrl_url) as engine:
        first = await ranks.publish_weights(0)
        first_scores = await serve(engine, first)
        before = await engine.generate(PROMPT, Sampling(1.0, seed=2**62 + 1), 8)
        greedy = await engine.generate(PROMPT, Sampling(0.0), 8)

        result = await ranks.train_step(train_batch(1))
        second = await ranks.publish_weights(1)
        second_scores = await serve(engine, second)
        addresses = [read_reference(first.path), read_reference(second.path)]
        after = await engine.generate(PROMPT, Sampling(1.0, seed=2**62 + 1), 8)

    assert first_scores == pytest.approx(first.canary_logprobs, abs=CLOSE)
    assert second_scores == pytest.approx(second.canary_logprobs, abs=CLOSE)
    assert np.abs(second_scores - first_scores).max() > 0.01
    for turn in (before, greedy, after):
        assert len(turn.token_ids) == len(turn.logprobs) > 0
        assert turn.cut == (len(turn.token_ids) == 8 and turn.token_ids[-1] != STOP_ID)
    assert before.logprobs.tolist() != after.logprobs.tolist()
    assert [span.policy for turn in (before, after) for span in turn.spans] == [
        PolicyId(1, 0),
        PolicyId(1, 1),
    ]
    assert result.metrics["policy/updates"] == 1
    assert result.metrics["tokens/trained"] > 0
    assert [address.split("/", 3)[3] for address in addresses] == [
        "sampler_weights/step-000000",
        "sampler_weights/step-000001",
    ]
    # What this server does not tell is absent.
    assert "policy/loss" not in result.metrics


async def test_a_step_that_is_sent_twice_is_made_once(skyrl_url: str, tmp_path: Path) -> None:
    async with started(tmp_path / "once", skyrl_url) as ranks:
        await ranks.publish_weights(0)
        once = await train_to(ranks, 1)
    async with started(tmp_path / "twice", skyrl_url) as ranks:
        await ranks.publish_weights(0)
        book = shutil.copytree(tmp_path / "twice" / FOLDER, tmp_path / "book")
        await ranks.train_step(train_batch(1))
    shutil.rmtree(tmp_path / "twice" / FOLDER)
    shutil.copytree(book, tmp_path / "twice" / FOLDER)
    async with started(tmp_path / "twice", skyrl_url) as ranks:
        twice = await train_to(ranks, 1)
    assert twice.canary_logprobs == pytest.approx(once.canary_logprobs, abs=CLOSE)


async def test_a_run_goes_on_from_a_checkpoint_with_its_optimizer(
    skyrl_url: str, tmp_path: Path
) -> None:
    async with started(tmp_path / "first", skyrl_url) as ranks:
        await ranks.train_step(train_batch(1))
        await (await ranks.begin_checkpoint(tmp_path / "checkpoint"))
        uninterrupted = await train_to(ranks, 2)
    async with started(tmp_path / "second", skyrl_url, tmp_path / "checkpoint") as ranks:
        resumed = await train_to(ranks, 2)
    assert resumed.canary_logprobs == pytest.approx(uninterrupted.canary_logprobs, abs=CLOSE)
