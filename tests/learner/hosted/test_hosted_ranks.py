import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.weights.sampler_reference import read_reference
from flotilla_learner.hosted.hosted_ranks import HostedRanks
from flotilla_learner.ports import RankError
from flotilla_learner.types import Standing
from tests.learner.hosted.conftest import HostedFront
from tests.learner.hosted.hosted_runs import learner_config, open_ranks, started, train_batch
from tests.support.tinker_front import KEY
from tests.support.waiting import until

# The client's threads and libraries warn of what is no matter of ours.
pytestmark = pytest.mark.filterwarnings("ignore")
DUMPED = learner_config(algorithm={"epochs": 2, "mini_batches": 3})


def page_of(run_dir: Path) -> Mapping[str, Any]:
    return json.loads((run_dir / "hosted" / "book.json").read_text())


async def end_session(front: HostedFront, run_dir: Path) -> None:
    """Have the service forget the run's session and its model."""
    async with httpx.AsyncClient(headers={"X-API-Key": KEY}) as http:
        session = page_of(run_dir)["model"]["session_id"]
        reason = {"reason": {"type": "success"}}
        answer = await http.post(f"{front.url}/api/v1/sessions/{session}/finish", json=reason)
    assert answer.is_success


async def save(ranks: HostedRanks, run_dir: Path, step: int) -> Path:
    """A checkpoint, as `Checkpoints` makes it."""
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    await (await ranks.begin_checkpoint(folder))
    return folder


async def test_a_step_makes_its_updates_and_reports_what_ranks_report(
    front: HostedFront, tmp_path: Path
) -> None:
    async with started(tmp_path, front.url, config=DUMPED) as ranks:
        result = await ranks.train_step(train_batch())
    assert front.trainer.updates == 6
    metrics = result.metrics
    assert (metrics["policy/updates"], metrics["policy/lr"]) == (6.0, 1e-2)
    assert metrics["policy/grad_norm"] >= 0
    assert metrics["mismatch/logprob_abs_diff_mean"] > 0
    assert 0 < metrics["tokens/trained"] == metrics["tokens/trained_total"]
    assert not result.skipped
    assert result.versions[0].tokens > 0
    tokens = result.tokens
    assert tokens is not None
    assert set(tokens.standings) == {Standing.TRAINED}
    counts = [int(each.policy_mask.sum()) for each in train_batch().sequences]
    assert [len(each) for each in tokens.logprobs] == counts
    # Later mini-batches are scored after an update.
    known = [bool(np.isfinite(each).all()) for each in tokens.logprobs]
    assert known == [True] * 4 + [False] * 8
    assert np.isnan(np.concatenate(tokens.entropy)).all()
    assert result.token_file is not None


async def test_a_publication_is_the_address_of_weights_and_a_canary(
    front: HostedFront, tmp_path: Path
) -> None:
    async with started(tmp_path, front.url) as ranks:
        first = await ranks.publish_weights(0)
        again = await ranks.publish_weights(0)
        await ranks.train_step(train_batch())
        second = await ranks.publish_weights(1)
        assert read_reference(second.path).endswith("/sampler_weights/step-000001")
    assert first.fingerprint == again.fingerprint != second.fingerprint
    assert len(first.canary_logprobs) == len(first.canary_token_ids) - 1
    assert front.trainer.count("export") == 2


async def test_a_killed_learner_goes_on_and_every_step_is_made_once(
    front: HostedFront, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    async with started(whole, front.url) as ranks:
        steady = [(await ranks.train_step(train_batch(step))).metrics for step in (1, 2, 3)]
    before = front.trainer.updates
    first = open_ranks(tmp_path, front.url)
    await first.start_ranks(None)
    published = await first.publish_weights(0)
    results = [await first.train_step(train_batch(1))]
    model_id = page_of(tmp_path)["model"]["model_id"]
    front.trainer.gates[model_id] = asyncio.Event()
    cut_off = asyncio.create_task(first.train_step(train_batch(2)))
    await until(lambda: page_of(tmp_path)["pending"] is not None)
    # Its orders have arrived, and their answers have not.
    await asyncio.sleep(0.5)
    cut_off.cancel()
    await asyncio.wait({cut_off})
    front.trainer.gates.pop(model_id).set()
    async with started(tmp_path, front.url) as second:
        assert (await second.publish_weights(0)).fingerprint == published.fingerprint
        assert page_of(tmp_path)["model"]["model_id"] == model_id
        results = [await second.train_step(train_batch(step)) for step in (1, 2, 3)]
    assert front.trainer.updates - before == 3
    for result, expected in zip(results, steady, strict=True):
        assert result.metrics["policy/loss"] == expected["policy/loss"]
    assert results[-1].metrics["tokens/trained_total"] == steady[-1]["tokens/trained_total"]


async def test_without_its_session_a_run_goes_on_from_its_checkpoint(
    front: HostedFront, tmp_path: Path
) -> None:
    first = open_ranks(tmp_path, front.url)
    await first.start_ranks(None)
    await first.publish_weights(0)
    await first.train_step(train_batch(1))
    checkpoint = await save(first, tmp_path, 1)
    known = await first.train_step(train_batch(2))
    await end_session(front, tmp_path)
    async with started(tmp_path, front.url, checkpoint) as second:
        page = page_of(tmp_path)
        assert (page["start"], page["version"]) == (1, 1)
        again = await second.train_step(train_batch(2))
    assert again.metrics["policy/loss"] == known.metrics["policy/loss"]
    assert front.trainer.updates == 3
    total = again.metrics["tokens/trained_total"] - known.metrics["tokens/trained_total"]
    assert total == again.metrics["tokens/trained"]


async def test_without_session_and_checkpoint_the_first_policy_keeps_its_address(
    front: HostedFront, tmp_path: Path
) -> None:
    first = open_ranks(tmp_path, front.url)
    await first.start_ranks(None)
    published = await first.publish_weights(0)
    await end_session(front, tmp_path)
    async with started(tmp_path, front.url) as second:
        assert (await second.publish_weights(0)).fingerprint == published.fingerprint


async def test_another_rank_is_refused_even_before_the_first_checkpoint(
    front: HostedFront, tmp_path: Path
) -> None:
    async with started(tmp_path, front.url) as ranks:
        await ranks.train_step(train_batch(1))
    other = open_ranks(tmp_path, front.url, learner_config(lora={"rank": 4}))
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank: 4, but the run trains 8"):
        await other.start_ranks(None)
    await other.close()
    async with started(tmp_path, front.url) as ranks:
        assert page_of(tmp_path)["version"] == 1


async def test_a_model_that_goes_away_in_a_step_is_made_again_at_the_next_start(
    front: HostedFront, tmp_path: Path
) -> None:
    first = open_ranks(tmp_path, front.url)
    await first.start_ranks(None)
    await end_session(front, tmp_path)
    with pytest.raises(RankError, match="from its newest checkpoint at the next start"):
        await first.train_step(train_batch(1))
    await first.close()
    async with started(tmp_path, front.url) as second:
        assert (await second.train_step(train_batch(1))).metrics["policy/updates"] == 1


async def test_a_step_of_other_samples_than_the_model_has_learned_is_trained_from_saved_state(
    front: HostedFront, tmp_path: Path
) -> None:
    first = open_ranks(tmp_path, front.url)
    await first.start_ranks(None)
    await first.train_step(train_batch(1))
    # A journal that was restored from a copy, and has gone on otherwise.
    other = replace(train_batch(2), step=1)
    async with started(tmp_path, front.url) as second:
        with pytest.raises(RankError, match="step 1 was made of other samples"):
            await second.train_step(other)
    async with started(tmp_path, front.url) as third:
        await third.train_step(other)
        assert page_of(tmp_path)["version"] == 1
    assert front.trainer.updates == 2


async def test_nothing_superseded_stays_at_the_service(front: HostedFront, tmp_path: Path) -> None:
    config = learner_config(steps=5, checkpoint={"keep": 1})
    ranks = open_ranks(tmp_path, front.url, config)
    await ranks.start_ranks(None)
    for step in range(1, 6):
        await ranks.train_step(train_batch(step))
        await ranks.publish_weights(step)
        await save(ranks, tmp_path, step)
    page = page_of(tmp_path)
    assert [each["version"] for each in page["published"]] == [3, 4, 5]
    assert [each["version"] for each in page["states"]] == [4, 5]
    assert page["superseded"] == []
    await ranks.close()
    page = page_of(tmp_path)
    assert page["model"] is None
    assert [len(page[kind]) for kind in ("published", "states", "superseded")] == [1, 1, 0]
    kept = {each.name for each in (tmp_path / "hosted").iterdir()}
    assert kept <= {"book.json", "step-000005.json", "step-000005.safetensors"}


async def test_a_checkpoint_is_an_address(front: HostedFront, tmp_path: Path) -> None:
    async with started(tmp_path, front.url) as ranks:
        await ranks.train_step(train_batch(1))
        folder = await save(ranks, tmp_path, 1)
        again = await save(ranks, tmp_path, 1)
    assert folder == again
    state = json.loads((folder / "tinker.json").read_text())
    assert (state["step"], state["lora_rank"]) == (1, 8)
    assert state["address"].endswith("/weights/step-000001")
    assert front.trainer.count("save") == 1


async def test_a_checkpoint_that_the_service_has_lost_says_how_to_go_on(
    front: HostedFront, tmp_path: Path
) -> None:
    async with started(tmp_path, front.url) as ranks:
        await ranks.train_step(train_batch(1))
        checkpoint = await save(ranks, tmp_path, 1)
    await end_session(front, tmp_path)
    state = checkpoint / "tinker.json"
    state.write_text(state.read_text().replace("step-000001", "step-000009"))
    resumed = open_ranks(tmp_path, front.url)
    with pytest.raises(ConfigError, match=f"step-000009 is not at.*move {checkpoint} away"):
        await resumed.start_ranks(checkpoint)
    await resumed.close()


async def test_sequences_beyond_the_context_are_cut(front: HostedFront, tmp_path: Path) -> None:
    batch = train_batch(longest=90)
    long = [each for each in batch.sequences if len(each.token_ids) > 66]
    async with started(tmp_path, front.url) as ranks:
        result = await ranks.train_step(batch)
    assert result.metrics["policy/truncated"] == len(long) > 0
    assert result.metrics["policy/verified"] == 0
    assert not {"policy/entropy", "policy/clip_ratio", "policy/post_update_kl"} & {*result.metrics}
    assert result.tokens is not None
    for sequence, logprobs in zip(batch.sequences, result.tokens.logprobs, strict=True):
        kept = int(sequence.policy_mask[:64].sum())
        assert len(logprobs) == sequence.policy_mask.sum()
        assert np.isfinite(logprobs[:kept]).all()
        assert np.isnan(logprobs[kept:]).all()


async def test_a_step_without_a_signal_orders_nothing(front: HostedFront, tmp_path: Path) -> None:
    batch = train_batch()
    flat = replace(batch, sequences=tuple(replace(each, reward=1.0) for each in batch.sequences))
    async with started(tmp_path, front.url) as ranks:
        result = await ranks.train_step(flat)
        assert result.metrics["policy/updates"] == 0
        await ranks.publish_weights(1)
    assert front.trainer.updates == 0


async def test_steps_come_in_order(front: HostedFront, tmp_path: Path) -> None:
    async with started(tmp_path, front.url) as ranks:
        with pytest.raises(RankError, match="step 3 requested"):
            await ranks.train_step(train_batch(3))


async def test_a_checkpoint_of_own_ranks_is_refused(front: HostedFront, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint of own ranks"):
        await open_ranks(tmp_path, front.url).start_ranks(tmp_path)
