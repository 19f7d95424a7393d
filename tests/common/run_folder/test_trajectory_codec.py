"""A trajectory comes back from its row of the journal as it went in."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Experts, Media, Sequence, Trajectory, content_digest
from flotilla_common.run_folder.trajectory_codec import (
    array_bytes,
    record_digest,
    restore_trajectory,
    summary_json,
)


def make_sequence(experts: Experts | None) -> Sequence:
    text = b"what a tool answered"
    media = Media(hashlib.sha256(text).hexdigest(), "text/plain", content=text)
    spans = (Span(Author.PROMPT, 2), Span(Author.POLICY, 3, PolicyId(1, 4, b"f" * 32), 0.5))
    return Sequence(
        np.arange(5, dtype=np.int32), spans, -np.arange(3, dtype=np.float32), (media,), experts
    )


def make_trajectory(*experts: Experts | None) -> Trajectory:
    sequences = tuple(make_sequence(each) for each in experts)
    return Trajectory(
        AttemptKey("g", 1, 0),
        "lease",
        sequences,
        content_digest(sequences),
        reward=1.0,
        stop_reason=StopReason.DONE,
    )


def restored(made: Trajectory, text: str) -> Trajectory:
    return restore_trajectory(
        made.key, made.reward, None, made.content_digest, text, array_bytes(made)
    )


NARROW = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
WIDE = np.arange(500, 512, dtype=np.uint16).reshape(2, 3, 2)


@pytest.mark.parametrize("experts", [(None, None), (NARROW, None, WIDE), (WIDE, NARROW)])
def test_a_row_holds_all_arrays(experts: tuple[Experts | None, ...]) -> None:
    made = make_trajectory(*experts)
    found = restored(made, summary_json(made))
    for got, put in zip(found.sequences, made.sequences, strict=True):
        np.testing.assert_array_equal(got.token_ids, put.token_ids)
        np.testing.assert_array_equal(got.logprobs, put.logprobs)
        assert (got.spans, got.media) == (put.spans, put.media)
        assert (got.experts is None) == (put.experts is None)
        if got.experts is not None and put.experts is not None:
            assert got.experts.dtype == put.experts.dtype
            np.testing.assert_array_equal(got.experts, put.experts)
    assert record_digest(found) == record_digest(made)


def test_a_row_holds_candidates_and_one_without_any_is_as_before() -> None:
    made = make_trajectory(NARROW, None, WIDE)
    first, *others = made.sequences
    candidates = np.array([[0, 5], [1, -1], [7, 2]], np.int32)
    held = replace(made, sequences=(replace(first, candidates=candidates), *others))
    found = restored(held, summary_json(held)).sequences
    np.testing.assert_array_equal(found[0].candidates, candidates)  # pyright: ignore[reportArgumentType]
    assert [each.candidates for each in found[1:]] == [None, None]
    np.testing.assert_array_equal(found[2].experts, WIDE)  # pyright: ignore[reportArgumentType]
    assert "candidates" not in json.loads(summary_json(made))["sequences"][0]
    assert len(array_bytes(held)) == len(array_bytes(made)) + candidates.nbytes


def test_other_experts_are_another_content() -> None:
    assert content_digest(make_trajectory(NARROW).sequences) != content_digest(
        make_trajectory(NARROW[::-1]).sequences
    )


def test_a_row_holds_named_rewards_which_format_7_had_not() -> None:
    made = replace(make_trajectory(None), named_rewards={"style": 0.5, "correct": -1.0})
    text = summary_json(made)
    assert restored(made, text).named_rewards == made.named_rewards
    former = {name: value for name, value in json.loads(text).items() if name != "named_rewards"}
    assert restored(made, json.dumps(former)).named_rewards == {}


def test_a_try_that_is_sent_with_other_named_rewards_is_another_try() -> None:
    made = make_trajectory(None)
    style, other = (replace(made, named_rewards={"style": value}) for value in (0.5, 0.25))
    assert len({record_digest(each) for each in (made, style, other)}) == 3
