"""Checkpoints by Tinker's own client."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from tests.tinker.client.served import (
    Served,
    client_of,
    client_tests,
    example,
    logprobs_of,
    new_trainer,
    sampled_logprobs_of,
    tinker,
    train_step,
)
from tests.tinker.client.stage import MODEL

pytestmark = client_tests

SENTENCE = tuple(range(300, 320))
CLOSE = 1e-4


@pytest.fixture
def rest(served: Served) -> Any:
    return tinker.RestClient(base_url=served.url, api_key=served.key)


@pytest.fixture
def learning(trainer: Any) -> Any:
    """A model with a momentum."""
    for _ in range(3):
        train_step(trainer, [example(SENTENCE)])
    return trainer


def after_a_step(trainer: Any) -> np.ndarray:
    train_step(trainer, [example(SENTENCE)])
    return logprobs_of(trainer, SENTENCE)


def test_a_model_resumes_as_if_it_had_never_stopped(client: Any, learning: Any) -> None:
    path = learning.save_state("resumed").result().path
    before, after = logprobs_of(learning, SENTENCE), after_a_step(learning)
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs_of(again, SENTENCE) == pytest.approx(before, abs=CLOSE)
    assert after_a_step(again) == pytest.approx(after, abs=CLOSE)


def test_a_model_may_start_from_weights_without_their_momentum(client: Any, learning: Any) -> None:
    path = learning.save_state("weights").result().path
    before, after = logprobs_of(learning, SENTENCE), after_a_step(learning)
    again = client.create_training_client_from_state(path).result()
    assert again.get_info().lora_rank == 8
    assert logprobs_of(again, SENTENCE) == pytest.approx(before, abs=CLOSE)
    assert np.abs(after_a_step(again) - after).max() > CLOSE


def test_a_model_of_all_weights_resumes(client: Any) -> None:
    trainer = new_trainer(client, rank=0)
    train_step(trainer, [example(SENTENCE)])
    path = trainer.save_state("whole").result().path
    after = after_a_step(trainer)
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert after_a_step(again) == pytest.approx(after, abs=CLOSE)


def test_another_session_resumes_a_checkpoint(served: Served, learning: Any) -> None:
    path = learning.save_state("handed-over").result().path
    expected = logprobs_of(learning, SENTENCE)
    with client_of(served) as other:
        again = other.create_training_client_from_state_with_optimizer(path).result()
        assert logprobs_of(again, SENTENCE) == pytest.approx(expected, abs=CLOSE)


def test_checkpoints_are_listed_with_what_they_are(rest: Any, learning: Any) -> None:
    state = learning.save_state("a").result().path
    weights = learning.save_weights_for_sampler("b").result().path
    listed = rest.list_checkpoints(learning.model_id).result().checkpoints
    kinds = {each.tinker_path: each.checkpoint_type for each in listed}
    assert kinds == {state: "training", weights: "sampler"}
    assert all(each.size_bytes and each.expires_at is None for each in listed)
    mine = rest.list_user_checkpoints().result().checkpoints
    assert {state, weights} <= {each.tinker_path for each in mine}


def test_weights_say_what_they_are_of(rest: Any, learning: Any) -> None:
    path = learning.save_state("described").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 8)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.training_run_id, run.base_model) == (learning.model_id, MODEL)


def test_a_checkpoint_may_expire(rest: Any, learning: Any) -> None:
    path = learning.save_state("short", ttl_seconds=3600).result().path

    def expiry() -> datetime | None:
        (found,) = rest.list_checkpoints(learning.model_id).result().checkpoints
        return found.expires_at

    first = expiry()
    assert first is not None
    assert timedelta(minutes=50) < first - datetime.now(UTC) <= timedelta(hours=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, 2 * 86400).result()
    second = expiry()
    assert second is not None and second - first > timedelta(days=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expiry() is None


def test_a_deleted_checkpoint_is_gone_and_its_sampler_stays(
    rest: Any, client: Any, learning: Any
) -> None:
    path = learning.save_weights_for_sampler("gone").result().path
    expected = sampled_logprobs_of(
        client.create_sampling_client(model_path=path).result(), SENTENCE
    )
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(learning.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="gone"):
        client.create_sampling_client(model_path=path).result()
    sampler = learning.save_weights_and_get_sampling_client().result()
    assert sampled_logprobs_of(sampler, SENTENCE) == pytest.approx(expected, abs=CLOSE)


def test_a_name_is_not_used_twice_for_other_weights(client: Any, learning: Any) -> None:
    path = learning.save_state("once").result().path
    before = logprobs_of(learning, SENTENCE)
    after_a_step(learning)
    try:
        learning.save_state("once").result()
    except tinker.TinkerError as error:
        assert "once" in str(error)
    again = client.create_training_client_from_state(path).result()
    kept = logprobs_of(again, SENTENCE)
    moved = logprobs_of(learning, SENTENCE)
    assert min(np.abs(kept - before).max(), np.abs(kept - moved).max()) < CLOSE


def test_an_unknown_checkpoint_is_named(client: Any, learning: Any) -> None:
    path = f"tinker://{learning.model_id}/weights/never"
    with pytest.raises((tinker.TinkerError, ValueError), match="never"):
        client.create_training_client_from_state(path).result()
