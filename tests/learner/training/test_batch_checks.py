"""What callers may send, and how the others learn what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla_learner.training.batch_checks import (
    RawSequence,
    SequenceLimits,
    check_update,
    complete_options,
    decode_sequence,
)
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training_types import AdamUpdate

LIMITS = SequenceLimits(max_model_len=4, vocabulary=10)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ids(kind: str, *values: int) -> bytes:
    return np.array(values, kind).tobytes()


ENTROPY = RawSequence(ids("<i4", 1, 9), ids("<i8", 0, 9), 0, {"weights": floats(1, -1)})
SAMPLED = {"logprobs": floats(-1, -2), "advantages": floats(1, 1)}
WIDE = RawSequence(
    ids("<i4", 1, 2), ids("<i8", 1, 2, 3, 4), 2, {"weights": floats(0.1, 0.2, 0.3, 0.4)}
)


def test_a_sequence_is_decoded_as_it_is() -> None:
    found = decode_sequence(0, ENTROPY, "cross_entropy", LIMITS)
    assert found.token_ids.tolist() == [1, 9]
    assert found.target_ids.tolist() == [0, 9]
    assert {name: v.tolist() for name, v in found.inputs.items()} == {"weights": [1, -1]}
    wide = decode_sequence(0, WIDE, "cross_entropy", LIMITS)
    assert wide.target_ids.tolist() == [[1, 2], [3, 4]]
    assert wide.inputs["weights"].shape == (2, 2)


def test_a_mask_is_1_unless_one_is_given() -> None:
    plain = decode_sequence(0, replace(ENTROPY, inputs=SAMPLED), "ppo", LIMITS)
    assert plain.inputs["mask"].tolist() == [1, 1]
    masked = {**SAMPLED, "mask": floats(0, 1)}
    given = decode_sequence(0, replace(ENTROPY, inputs=masked), "ppo", LIMITS)
    assert given.inputs["mask"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("loss", "raw", "problem"),
    [
        ("cross_entropy", replace(ENTROPY, token_ids=b""), "sequence 3 has 0 tokens; expected 1"),
        (
            "cross_entropy",
            replace(ENTROPY, token_ids=ids("<i4", *[1] * 5)),
            "sequence 3 has 5 tokens; expected 1 to policy.max_model_len, 4",
        ),
        (
            "cross_entropy",
            replace(ENTROPY, token_ids=b"abc"),
            "sequence 3: token_ids has 3 bytes, not a multiple of 4",
        ),
        (
            "cross_entropy",
            replace(ENTROPY, target_ids=ids("<i8", 1)),
            "sequence 3: target_ids has 1 values; expected 2",
        ),
        ("cross_entropy", replace(WIDE, targets=3), "target_ids has 4 values; expected 2 x 3"),
        (
            "cross_entropy",
            replace(ENTROPY, token_ids=ids("<i4", 1, 10)),
            "sequence 3: token_ids has 10",
        ),
        (
            "cross_entropy",
            replace(ENTROPY, target_ids=ids("<i8", -1, 1)),
            "sequence 3: target_ids has -1",
        ),
        (
            "cross_entropy",
            replace(WIDE, target_ids=ids("<i8", 1, 1, 1, 77)),
            "sequence 3: target_ids has 77",
        ),
        ("cross_entropy", replace(ENTROPY, inputs={}), "sequence 3 has no 'weights'"),
        (
            "cross_entropy",
            replace(ENTROPY, inputs={"weights": floats(1)}),
            r"sequence 3: inputs\['weights'\] has 1 values; expected 2",
        ),
        (
            "cross_entropy",
            replace(ENTROPY, inputs={"weights": floats(1, float("nan"))}),
            r"inputs\['weights'\] has numbers that are not finite",
        ),
        ("cross_entropy", replace(ENTROPY, targets=-1), "sequence 3: -1 targets at each position"),
        (
            "ppo",
            replace(WIDE, inputs=SAMPLED),
            "sequence 3: 2 targets at each position; ppo takes 1",
        ),
        (
            "gspo",
            replace(ENTROPY, inputs=SAMPLED),
            "has no 'sequence_ratio_mask'; gspo needs logprobs, advantages, sequence_ratio_mask",
        ),
        (
            "dro",
            replace(ENTROPY, inputs={**SAMPLED, "weights": floats(1, 1)}),
            "sequence 3: dro takes no 'weights'; it takes logprobs, advantages, mask",
        ),
    ],
)
def test_what_is_wrong_with_a_sequence_is_named(loss: str, raw: RawSequence, problem: str) -> None:
    with pytest.raises(OperationRefused, match=problem) as caught:
        decode_sequence(3, raw, loss, LIMITS)
    assert caught.value.reason == "BAD_BATCH"


def test_options_have_defaults() -> None:
    assert complete_options("dro", {}) == {"beta": 0.05}
    found = complete_options("ppo", {"clip_high_threshold": 1.5})
    assert found == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}


@pytest.mark.parametrize(
    ("loss", "options", "reason", "problem"),
    [
        ("sft", {}, "UNKNOWN_LOSS", "no loss 'sft'; there are cross_entropy, importance_sampling"),
        ("dro", {"betta": 1.0}, "BAD_BATCH", "dro has no 'betta'; it has beta"),
        ("cross_entropy", {"beta": 1.0}, "BAD_BATCH", "cross_entropy has no 'beta'; it has none"),
        ("dro", {"beta": float("inf")}, "BAD_BATCH", "beta is inf; it must be finite"),
        ("ppo", {"clip_low_threshold": 1.3}, "BAD_BATCH", "1.3 is above clip_high_threshold 1.2"),
    ],
)
def test_options_that_a_loss_does_not_have_are_refused(
    loss: str, options: dict[str, float], reason: str, problem: str
) -> None:
    with pytest.raises(OperationRefused, match=problem) as caught:
        complete_options(loss, options)
    assert caught.value.reason == reason


UPDATE = AdamUpdate(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("learning_rate", -1.0, "learning_rate is -1.0; expected 0 or more"),
        ("learning_rate", float("nan"), "learning_rate is nan"),
        ("beta1", 1.0, "beta1 is 1.0; expected from 0 to below 1"),
        ("eps", 0.0, "eps is 0.0; expected above 0"),
        ("weight_decay", float("inf"), "weight_decay is inf"),
        ("grad_clip_norm", -0.1, "grad_clip_norm is -0.1; expected 0 or more"),
    ],
)
def test_an_update_that_adamw_cannot_make_is_refused(name: str, value: float, problem: str) -> None:
    check_update(replace(UPDATE, learning_rate=0.0))
    with pytest.raises(OperationRefused, match=problem) as caught:
        check_update(replace(UPDATE, **{name: value}))  # pyright: ignore[reportArgumentType]
    assert caught.value.reason == "BAD_SETTINGS"
