"""Training by Tinker's own client."""

from typing import Any

import numpy as np
import pytest

from tests.tinker.client.served import (
    Served,
    adam,
    client_of,
    client_tests,
    example,
    logprobs_of,
    new_trainer,
    tinker,
    train_step,
)
from tests.tinker.client.stage import MODEL

pytestmark = client_tests

SENTENCE = tuple(range(300, 320))
OTHER = tuple(range(90, 120))
CLOSE = 1e-5


def test_the_capabilities_name_the_model(served: Served) -> None:
    rest = tinker.RestClient(base_url=served.url, api_key=served.key)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.trainable, model.sampleable) == (MODEL, True, True)
    assert model.max_context_length == 2048


def test_a_model_says_what_it_is(trainer: Any) -> None:
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (MODEL, True, 8)


@pytest.mark.parametrize("rank", [8, 0])
def test_a_model_learns_a_sentence(client: Any, rank: int) -> None:
    trainer = new_trainer(client, rank=rank)
    losses = [train_step(trainer, [example(SENTENCE)]).metrics["loss:sum"] for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert -logprobs_of(trainer, SENTENCE).sum() < losses[0] / 2


def test_a_loss_is_the_weighted_sum_over_tokens(trainer: Any) -> None:
    weights = np.linspace(-1, 2, len(SENTENCE) - 1, dtype=np.float32)
    result = trainer.forward_backward(
        [example(SENTENCE, weights=weights), example(OTHER)], "cross_entropy"
    ).result()
    first, second = (np.array(out["logprobs"].data) for out in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(
        -(first * weights).sum() - second.sum(), rel=1e-4
    )


def test_training_goes_on_after_a_batch_that_was_refused(trainer: Any) -> None:
    for _ in range(2):
        with pytest.raises(tinker.BadRequestError, match="loss_fn=importance_sampling"):
            trainer.forward_backward([example(SENTENCE)], "stable_reinforce").result()
    first, *_, last = (
        train_step(trainer, [example(SENTENCE)]).metrics["loss:sum"] for _ in range(5)
    )
    assert last < first


def test_a_target_may_have_several_tokens(trainer: Any) -> None:
    targets = np.stack([SENTENCE[1:], OTHER[1 : len(SENTENCE)]], axis=1).astype(np.int64)
    weights = np.full(targets.shape, 0.5, np.float32)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(SENTENCE[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(targets),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )
    result = trainer.forward([datum], "cross_entropy").result()
    found = np.array(result.loss_fn_outputs[0]["logprobs"].data).reshape(targets.shape)
    assert found[:, 0] == pytest.approx(logprobs_of(trainer, SENTENCE), abs=CLOSE)
    assert result.metrics["loss:sum"] == pytest.approx(-(found * weights).sum(), rel=1e-4)


def expected_loss(name: str, logprobs: np.ndarray, old: np.ndarray, gain: np.ndarray) -> float:
    """The published formula of a loss, for one sequence."""
    ratio = np.exp(logprobs - old)
    clipped = ratio.clip(0.8, 1.2)
    losses = {
        "importance_sampling": -ratio * gain,
        "ppo": -np.minimum(ratio * gain, clipped * gain),
        "cispo": -clipped * logprobs * gain,
        "dro": -(logprobs * gain - 0.5 * 0.05 * (logprobs - old) ** 2),
    }
    return float(losses[name].sum())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_loss_of_rl_is_the_published_one(trainer: Any, name: str) -> None:
    draw = np.random.default_rng(0)
    now = logprobs_of(trainer, SENTENCE)
    old = (now + draw.normal(0, 0.3, len(now))).astype(np.float32)
    gain = draw.normal(0, 1, len(now)).astype(np.float32)
    datum = example(SENTENCE, logprobs=old, advantages=gain)
    options = {"beta": 0.05} if name == "dro" else None
    result = trainer.forward_backward([datum], name, options).result()
    assert result.metrics["loss:sum"] == pytest.approx(
        expected_loss(name, now, old, gain), rel=1e-3
    )


def test_gspo_takes_the_ratio_of_the_marked_tokens(trainer: Any) -> None:
    now = logprobs_of(trainer, SENTENCE)
    mask = np.array([0.0] * 5 + [1.0] * (len(now) - 5), np.float32)
    gain = mask * 2
    datum = example(SENTENCE, logprobs=now, advantages=gain, sequence_ratio_mask=mask)
    result = trainer.forward_backward([datum], "gspo").result()
    assert result.metrics["loss:sum"] == pytest.approx(-gain.sum(), rel=1e-3)


def test_clip_thresholds_are_heeded(trainer: Any) -> None:
    now = logprobs_of(trainer, SENTENCE)
    gain = np.ones(len(now), np.float32)
    datum = example(SENTENCE, logprobs=now - 2, advantages=gain)
    options = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    result = trainer.forward([datum], "ppo", options).result()
    assert result.metrics["loss:sum"] == pytest.approx(-3.0 * len(now), rel=1e-3)


def test_gradients_of_several_calls_add_up(client: Any) -> None:
    whole, parts = new_trainer(client), new_trainer(client)
    train_step(whole, [example(SENTENCE), example(OTHER)])
    for ids in (SENTENCE, OTHER):
        parts.forward_backward([example(ids)], "cross_entropy").result()
    parts.optim_step(adam()).result()
    expected = logprobs_of(whole, SENTENCE)
    assert logprobs_of(parts, SENTENCE) == pytest.approx(expected, abs=1e-4)


def test_what_has_no_weight_changes_nothing(client: Any) -> None:
    bare, padded = new_trainer(client), new_trainer(client)
    nothing = np.zeros(len(OTHER) - 1, np.float32)
    padded.forward_backward([example(OTHER, weights=nothing)], "cross_entropy").result()
    for trainer in (bare, padded):
        train_step(trainer, [example(SENTENCE)])
    expected = logprobs_of(bare, SENTENCE)
    assert logprobs_of(padded, SENTENCE) == pytest.approx(expected, abs=1e-4)


def test_a_forward_pass_leaves_no_gradient(client: Any) -> None:
    bare, looked = new_trainer(client), new_trainer(client)
    looked.forward([example(OTHER)], "cross_entropy").result()
    for trainer in (bare, looked):
        train_step(trainer, [example(SENTENCE)])
    expected = logprobs_of(bare, SENTENCE)
    assert logprobs_of(looked, SENTENCE) == pytest.approx(expected, abs=CLOSE)


def test_a_big_batch_arrives_in_chunks_and_keeps_its_order(trainer: Any) -> None:
    # The client sends at most 1,024 sequences in a request, all requests in parallel.
    draw = np.random.default_rng(0)
    batch = [draw.integers(10, 200, 6).tolist() for _ in range(2500)]
    result = trainer.forward_backward([example(ids) for ids in batch], "cross_entropy").result()
    found = [np.array(out["logprobs"].data) for out in result.loss_fn_outputs]
    assert len(found) == len(batch)
    for place in (0, 1023, 1024, 2047, 2048, 2499):
        assert found[place] == pytest.approx(logprobs_of(trainer, batch[place]), abs=1e-4)
    assert result.metrics["loss:sum"] == pytest.approx(-sum(each.sum() for each in found), rel=1e-4)


def test_steps_sent_before_their_results_are_awaited_run_in_order(client: Any) -> None:
    eager, patient = new_trainer(client), new_trainer(client)
    sent = [
        part
        for _ in range(4)
        for part in (
            eager.forward_backward([example(SENTENCE)], "cross_entropy"),
            eager.optim_step(adam()),
        )
    ]
    for part in sent:
        part.result()
    for _ in range(4):
        train_step(patient, [example(SENTENCE)])
    expected = logprobs_of(patient, SENTENCE)
    assert logprobs_of(eager, SENTENCE) == pytest.approx(expected, abs=1e-4)


def test_a_loss_of_the_clients_own_trains_like_the_servers(client: Any) -> None:
    own, servers = new_trainer(client), new_trainer(client)

    def cross_entropy(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        (only,) = logprobs
        loss = -only.sum()
        return loss, {"mine:sum": float(loss.detach())}

    result = own.forward_backward_custom([example(SENTENCE)], cross_entropy).result()
    own.optim_step(adam()).result()
    reference = train_step(servers, [example(SENTENCE)])
    assert result.metrics["mine:sum"] == pytest.approx(reference.metrics["loss:sum"], rel=1e-4)
    expected = logprobs_of(servers, SENTENCE)
    assert logprobs_of(own, SENTENCE) == pytest.approx(expected, abs=1e-4)


def test_several_models_of_one_base_do_not_touch_each_other(client: Any) -> None:
    first, second = new_trainer(client), new_trainer(client)
    before = logprobs_of(second, SENTENCE)
    train_step(first, [example(SENTENCE)])
    assert np.abs(logprobs_of(first, SENTENCE) - before).max() > 1e-3
    assert logprobs_of(second, SENTENCE) == pytest.approx(before, abs=CLOSE)


def test_a_seed_repeats_a_model(served: Served) -> None:
    learned: list[np.ndarray] = []
    for _ in range(2):
        with client_of(served) as client:
            trainer = new_trainer(client, seed=5)
            train_step(trainer, [example(SENTENCE)])
            learned.append(logprobs_of(trainer, SENTENCE))
    assert learned[0] == pytest.approx(learned[1], abs=CLOSE)


def test_a_gradient_is_clipped_as_asked(client: Any) -> None:
    free, clipped = new_trainer(client), new_trainer(client)
    for trainer, norm in ((free, 0.0), (clipped, 1e-9)):
        trainer.forward_backward([example(SENTENCE)], "cross_entropy")
        # A plain step: Adam would undo the scale of a first gradient, were it not for eps.
        trainer.optim_step(adam(eps=1e-4, grad_clip_norm=norm)).result()
    untouched = logprobs_of(new_trainer(client), SENTENCE)
    assert logprobs_of(clipped, SENTENCE) == pytest.approx(untouched, abs=1e-3)
    assert np.abs(logprobs_of(free, SENTENCE) - untouched).max() > 1e-2
