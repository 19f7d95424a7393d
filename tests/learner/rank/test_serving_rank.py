"""Models trained at a caller's request: gradients, updates and saved states."""

import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.packing import Segments
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.serving_rank import ServingRank, ServingSetup, load_served
from flotilla_learner.ranks import training_protocol
from flotilla_learner.training_types import (
    AdamUpdate,
    AdapterChoice,
    TargetBatch,
    TargetScores,
    TargetSequence,
)
from tests.support.rank_configs import ALONE, policy_config
from tests.support.target_batches import OPTIONS, arguments_of, equal, make_batch
from tests.support.tiny_ranks import same_bits

UPDATE = AdamUpdate(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)


class Served:
    """A rank, commanded as the service does it."""

    def __init__(self, folder: Path, scratch: Path, **settings: Any) -> None:
        given: dict[str, Any] = {
            "name": "served",
            "shm_dir": scratch,
            "policy": policy_config(folder),
            "rank": {"pack_tokens": 64, "head_chunk": 16},
            "frozen": True,
            "max_models": 4,
            "max_rank": 8,
            "place": ALONE,
        }
        setup = ServingSetup.model_validate({**given, **settings})
        self.base = load_served(setup)
        self._rank = ServingRank(setup, self.base)
        self._scratch = scratch

    def call(self, command: str, model: str, **arguments: Any) -> dict[str, Any]:
        return self._rank.commands[command]({"model": model, **arguments})

    def create(self, model: str, rank: int = 4, **choice: Any) -> int:
        answer = self.call("create", model, choice=asdict(AdapterChoice(rank, **choice)))
        return answer["parameters"]

    def accumulate(self, model: str, batch: TargetBatch) -> TargetScores:
        answer = self._rank.commands["accumulate"](arguments_of(batch, self._scratch, model))
        assert "refused" not in answer, answer
        return training_protocol.read_scores(answer, batch)

    def update(self, model: str, settings: AdamUpdate = UPDATE) -> float:
        return self.call("update", model, settings=asdict(settings))["grad_norm"]

    def parameters(self, model: str) -> Mapping[str, Tensor]:
        return self._rank.models[model].policy.trained_parameters()

    def weights(self, model: str) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters(model).items()}

    def gradients(self, model: str) -> dict[str, Tensor]:
        found = {name: value.grad for name, value in self.parameters(model).items()}
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    def scramble(self, model: str) -> None:
        """Set the adapter to random values, so that both of its matrices have a gradient."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for value in self.parameters(model).values():
                value.normal_(0, 0.1, generator=generator)

    def plain_logprobs(self, model: str, sequence: TargetSequence) -> Tensor:
        """Return the logprobs of a sequence's targets by the model's own pass."""
        policy = self._rank.models[model].policy
        assert policy.adapters is not None
        with policy.adapters.used(policy.adapters.own):
            ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
            logits: Any = policy.model(input_ids=ids[None], use_cache=False).logits[0]
        targets = torch.from_numpy(sequence.target_ids)
        wide = targets.reshape(len(targets), -1)
        return logits.log_softmax(-1).gather(1, wide).reshape(targets.shape)


@pytest.fixture
def served(model_folder: Path, tmp_path: Path) -> Served:
    return Served(model_folder, tmp_path)


def plain_loss(batch: TargetBatch, logprobs: Tensor, sequence: TargetSequence) -> Tensor:
    """The public formulas."""
    given = {name: torch.from_numpy(values) for name, values in sequence.inputs.items()}
    if batch.loss == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    sampled, advantages = given["logprobs"], given["advantages"]
    mask = given.get("mask", torch.ones_like(advantages))
    ratio = (logprobs - sampled).exp()
    if batch.loss == "importance_sampling":
        return -(ratio * advantages * mask).sum()
    if batch.loss == "dro":
        return -((logprobs * advantages - 0.025 * (logprobs - sampled) ** 2) * mask).sum()
    if batch.loss == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * logprobs * advantages * mask).sum()
    if batch.loss == "gspo":
        counted = given["sequence_ratio_mask"]
        ratio = (((logprobs - sampled) * counted).sum() / counted.sum()).exp()
    bounded = ratio.clamp(0.8, 1.2) * advantages
    return -(torch.minimum(ratio * advantages, bounded) * mask).sum()


@pytest.mark.parametrize(
    ("loss", "masked"),
    [
        (loss, masked)
        for loss in OPTIONS
        for masked in (False, True)
        if loss != "cross_entropy" or not masked
    ],
)
def test_every_gradient_is_that_of_the_public_formula(
    served: Served, loss: str, masked: bool
) -> None:
    served.create("a")
    served.scramble("a")
    batch = make_batch(loss, masked=masked)
    scores = served.accumulate("a", batch)
    check_by_formula(served, batch, scores)


def check_by_formula(
    served: Served, batch: TargetBatch, scores: TargetScores, tolerance: float = 1e-6
) -> None:
    """Compare the model's gradient and scores with those of its own pass."""
    logprobs = [served.plain_logprobs("a", each) for each in batch.sequences]
    pairs = zip(logprobs, batch.sequences, strict=True)
    parts = torch.stack([plain_loss(batch, values, each) for values, each in pairs])
    total = parts.sum()
    parameters = served.parameters("a")
    expected = torch.autograd.grad(total, list(parameters.values()))
    own = served.gradients("a")
    largest = max(float(value.abs().max()) for value in expected)
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(own[name], value, rtol=tolerance, atol=tolerance * largest)
    for values, found in zip(logprobs, scores.logprobs, strict=True):
        np.testing.assert_allclose(found, values.detach().numpy(), rtol=0, atol=1e-5)
    # Parts of both signs round by their own size, and not by that of their sum.
    rounding = 1e-5 * float(parts.detach().abs().sum())
    assert scores.metrics["loss:sum"] == pytest.approx(float(total.detach()), abs=rounding)


def test_several_targets_at_a_position_have_weights_of_their_own(served: Served) -> None:
    served.create("a")
    served.scramble("a")
    narrow, wide = make_batch(seed=1, count=2), make_batch(seed=2, count=2, targets=3)
    both = replace(narrow, sequences=[*narrow.sequences, *wide.sequences])
    scores = served.accumulate("a", both)
    assert [each.shape for each in scores.logprobs] == [
        each.target_ids.shape for each in both.sequences
    ]
    check_by_formula(served, both, scores)


def test_tokens_that_sequences_share_are_computed_once_with_the_same_gradient(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.create("a")
    served.scramble("a")
    batch = make_batch("importance_sampling", seed=4, count=6, prompt=10)
    kept = [each for each in batch.sequences if len(each.token_ids) > 12]
    batch = replace(batch, sequences=kept)
    computed: list[int] = []
    states = Policy.segment_states

    def listening(policy: Policy, segments: Segments, *more: Any) -> Tensor:
        computed.extend(segments.lengths)
        return states(policy, segments, *more)

    monkeypatch.setattr(Policy, "segment_states", listening)
    scores = served.accumulate("a", batch)
    assert sum(computed) < sum(len(each.token_ids) for each in kept)
    monkeypatch.undo()
    # Attention sums in another order.
    check_by_formula(served, batch, scores, 1e-5)


def test_bfloat16_and_recomputed_blocks_give_the_same_gradient(
    model_folder: Path, tmp_path: Path
) -> None:
    found: list[dict[str, Tensor]] = []
    settings = {"pack_tokens": 64, "head_chunk": 16}
    for dtype, checkpointing in (("float32", "off"), ("bfloat16", "off"), ("bfloat16", "full")):
        policy = policy_config(model_folder, dtype=dtype)
        rank = {**settings, "gradient_checkpointing": checkpointing}
        served = Served(model_folder, tmp_path, policy=policy, rank=rank)
        served.create("a")
        served.scramble("a")
        served.create("b", seed=9)
        served.accumulate("a", make_batch())
        found.append(served.gradients("a"))
    precise, rounded, recomputed = found
    assert same_bits(rounded, recomputed)
    one, other = (torch.cat([v.flatten() for v in each.values()]) for each in (precise, rounded))
    assert torch.cosine_similarity(one, other, dim=0) > 0.99


def test_several_calls_accumulate_what_one_call_does(served: Served) -> None:
    served.create("a")
    served.scramble("a")
    batch = make_batch("ppo", count=6)
    served.accumulate("a", batch)
    at_once = served.gradients("a")
    served.update("a", replace(UPDATE, learning_rate=0.0))
    assert not served.gradients("a")
    for part in (batch.sequences[:2], batch.sequences[2:3], batch.sequences[3:]):
        served.accumulate("a", replace(batch, sequences=part))
    for name, value in served.gradients("a").items():
        torch.testing.assert_close(value, at_once[name], rtol=1e-5, atol=1e-6)


def test_a_pass_for_scores_alone_accumulates_nothing(served: Served) -> None:
    served.create("a")
    batch = make_batch("dro")
    scores = served.accumulate("a", replace(batch, forward_only=True))
    assert not served.gradients("a")
    trained = served.accumulate("a", batch)
    assert scores.metrics == pytest.approx(trained.metrics)
    for one, other in zip(scores.logprobs, trained.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_those_of_adamw(served: Served, clip: float) -> None:
    served.create("a")
    copies = {n: v.clone().requires_grad_() for n, v in served.weights("a").items()}
    settings = AdamUpdate(3e-3, 0.8, 0.9, 1e-10, 0.1, clip)
    adamw = torch.optim.AdamW(
        copies.values(), lr=3e-3, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1
    )
    for step in range(4):
        # Without a gradient the moments still move the weights.
        if step != 2:
            served.accumulate("a", make_batch(seed=step))
        own = served.gradients("a")
        for name, value in copies.items():
            value.grad = own.get(name, torch.zeros_like(value))
        plain = torch.nn.utils.clip_grad_norm_(copies.values(), clip or float("inf"))
        assert served.update("a", settings) == pytest.approx(float(plain))
        adamw.step()
    for name, value in served.weights("a").items():
        torch.testing.assert_close(value, copies[name].detach(), rtol=1e-5, atol=1e-7)


CHOICES: dict[str, dict[str, Any]] = {
    "a": {"rank": 4, "seed": 1},
    "b": {"rank": 2, "seed": 1, "mlp": False},
    "c": {"rank": 8, "seed": 7, "attention": False},
}


def steps(served: Served, model: str, numbers: range) -> list[TargetScores]:
    found: list[TargetScores] = []
    for number in numbers:
        loss = "cross_entropy" if number % 2 else "importance_sampling"
        found.append(served.accumulate(model, make_batch(loss, seed=number + len(model))))
        served.update(model)
    return found


def test_models_on_one_base_train_as_each_does_alone(model_folder: Path, tmp_path: Path) -> None:
    alone: dict[str, tuple[list[TargetScores], dict[str, Tensor]]] = {}
    for model, choice in CHOICES.items():
        own = Served(model_folder, tmp_path)
        own.create(model, **choice)
        alone[model] = (steps(own, model, range(3)), own.weights(model))
    shared = Served(model_folder, tmp_path)
    counts = {model: shared.create(model, **choice) for model, choice in CHOICES.items()}
    sizes = {model: sum(v.numel() for v in shared.weights(model).values()) for model in CHOICES}
    assert counts == sizes
    found: dict[str, list[TargetScores]] = {model: [] for model in CHOICES}
    for number in range(3):
        if number == 2:
            # The others train on without it.
            shared.call("delete", "c")
        for model in list(found) if number < 2 else ["a", "b"]:
            found[model] += steps(shared, model, range(number, number + 1))
    for model in ("a", "b"):
        scores, weights = alone[model]
        assert all(equal(*pair) for pair in zip(found[model], scores, strict=True))
        assert same_bits(shared.weights(model), weights)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in shared.weights("b")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_deleted_model_leaves_nothing_on_the_base(served: Served) -> None:
    served.create("a")
    before = {name for name, _ in served.base.policy.model.named_parameters()}
    plain = served.accumulate("a", make_batch(forward_only=True))
    served.create("b", 8, seed=3)
    served.accumulate("b", make_batch())
    served.update("b")
    held = [weakref.ref(value) for value in served.parameters("b").values()]
    served.call("delete", "b")
    assert not any(each() for each in held)
    assert {name for name, _ in served.base.policy.model.named_parameters()} == before
    assert equal(served.accumulate("a", make_batch(forward_only=True)), plain)


def test_a_saved_state_continues_to_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    first = Served(model_folder, tmp_path)
    first.create("a", seed=5)
    steps(first, "a", range(2))
    saved = first.call("save", "a", folder=str(tmp_path / "state"), step=4, with_optimizer=True)
    assert set(saved["sha256"]) == {path.name for path in (tmp_path / "state").iterdir()}
    steps(first, "a", range(2, 4))
    other = Served(model_folder, tmp_path)
    other.create("a", seed=6)
    other.accumulate("a", make_batch())
    loaded = other.call("load", "a", folder=str(tmp_path / "state"), with_optimizer=True)
    assert loaded == {}
    assert not other.gradients("a")
    steps(other, "a", range(2, 4))
    assert same_bits(other.weights("a"), first.weights("a"))


def test_weights_alone_leave_the_moments(served: Served, tmp_path: Path) -> None:
    served.create("a")
    served.call("save", "a", folder=str(tmp_path / "state"), step=0, with_optimizer=True)
    start = served.weights("a")
    steps(served, "a", range(1))
    served.call("load", "a", folder=str(tmp_path / "state"), with_optimizer=False)
    assert same_bits(served.weights("a"), start)
    served.update("a")
    # The moments moved them.
    assert not same_bits(served.weights("a"), start)
    served.call("load", "a", folder=str(tmp_path / "state"), with_optimizer=True)
    served.update("a")
    assert same_bits(served.weights("a"), start)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"rank": 2}, "started with learner.lora.rank = 4, but it is 2"),
        ({"rank": 4, "mlp": False}, "other layers"),
    ],
)
def test_a_state_of_another_model_is_refused(
    served: Served, tmp_path: Path, choice: dict[str, Any], message: str
) -> None:
    served.create("a")
    served.call("save", "a", folder=str(tmp_path / "state"), step=0, with_optimizer=True)
    served.create("b", **choice)
    before = served.weights("b")
    answer = served.call("load", "b", folder=str(tmp_path / "state"), with_optimizer=True)
    assert answer["refused"] == "STATE_MISMATCH"
    assert message in answer["message"]
    assert same_bits(served.weights("b"), before)
    nowhere = served.call("load", "b", folder=str(tmp_path / "nowhere"), with_optimizer=True)
    assert nowhere["refused"] == "NO_STATE"


def test_what_is_not_finite_changes_nothing(served: Served, tmp_path: Path) -> None:
    served.create("a")
    served.scramble("a")
    served.accumulate("a", make_batch())
    before = served.gradients("a")
    wild = make_batch("importance_sampling")
    wild.sequences[0].inputs["logprobs"][:] = -1e9  # pyright: ignore[reportIndexIssue]
    answer = served.call("accumulate", **arguments_of(wild, tmp_path, "a"))  # pyright: ignore[reportArgumentType]
    assert answer["refused"] == "NOT_FINITE"
    assert same_bits(served.gradients("a"), before)
    # Without an advantage nothing is made of it.
    for sequence in wild.sequences:
        sequence.inputs["advantages"][:] = 0  # pyright: ignore[reportIndexIssue]
    assert served.accumulate("a", wild).metrics == {"loss:sum": 0.0}
    assert same_bits(served.gradients("a"), before)


def test_all_weights_of_a_model_of_its_own_are_trained(model_folder: Path, tmp_path: Path) -> None:
    first = Served(model_folder, tmp_path, frozen=False)
    count = first.create("whole", 0)
    assert count == sum(value.numel() for value in first.weights("whole").values())
    start = first.weights("whole")
    steps(first, "whole", range(2))
    assert not any(
        torch.equal(value, start[name]) for name, value in first.weights("whole").items()
    )
    first.call("save", "whole", folder=str(tmp_path / "state"), step=4, with_optimizer=True)
    steps(first, "whole", range(2, 4))
    other = Served(model_folder, tmp_path, frozen=False)
    other.create("whole", 0)
    other.call("load", "whole", folder=str(tmp_path / "state"), with_optimizer=True)
    steps(other, "whole", range(2, 4))
    assert same_bits(other.weights("whole"), first.weights("whole"))


def test_a_part_that_the_base_does_not_have_is_refused(served: Served) -> None:
    choice = asdict(AdapterChoice(4, attention=False, mlp=False))
    assert served.call("create", "a", choice=choice)["refused"] == "BAD_SETTINGS"
