"""Messages on the channel arrive as they were sent."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import StopReason
from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.ranks import protocol
from flotilla_learner.types import (
    ExpertShape,
    Histogram,
    ModelInfo,
    StepResult,
    StepSettings,
    TeacherScores,
    TrainBatch,
    TrainSequence,
    TurnTokens,
    VersionMismatch,
)
from tests.support.pictures import draw_picture
from tests.support.tiny_ranks import make_batch


def through(message: protocol.Message) -> protocol.Message:
    return protocol.decode_body(protocol.encode_frame(message)[protocol.HEADER.size :])


def make_scores(sequence: TrainSequence, *, top_k: int) -> TeacherScores:
    count, rng = int(sequence.policy_mask.sum()), np.random.default_rng(top_k)
    return TeacherScores(
        -rng.random(count).astype(np.float32),
        rng.integers(0, 97, (count, top_k)).astype(np.int32),
        -rng.random((count, top_k)).astype(np.float32),
    )


def test_a_batch_arrives_whole(tmp_path: Path) -> None:
    made = make_batch(shift=0.1)
    sequences = tuple(
        replace(
            s,
            stop_reason=reason,
            staleness=index,
            temperature=0.1 * index,
            experts=np.arange(12 * index, dtype=np.uint16).reshape(index, 3, 4) if index else None,
            turns=(TurnTokens(0, 3, 0.1 * index), TurnTokens(2, 1, None)) if index else (),
            named_rewards={"style": 0.1 * index} if index else {},
            candidates=np.arange(2 * index, dtype=np.int32).reshape(index, 2) if index else None,
            teacher=make_scores(s, top_k=index % 3) if index != 1 else None,
        )
        for index, (s, reason) in enumerate(zip(made.sequences, [*StopReason] * 3, strict=False))
    )
    batch = TrainBatch(7, sequences, StepSettings(ratio_limit=3.5, taught=True))
    found = protocol.read_batch(through(protocol.write_batch(tmp_path / "batch", batch)))
    assert (found.step, found.settings) == (7, batch.settings)
    assert len(found.sequences) == len(sequences)
    for got, sent in zip(found.sequences, sequences, strict=True):
        for name in ("token_ids", "policy_mask", "behaviour_logprobs"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
        for name in ("group_id", "attempt_index", "reward", "temperature", "staleness"):
            assert getattr(got, name) == getattr(sent, name)
        assert (got.turns, got.named_rewards) == (sent.turns, sent.named_rewards)
        assert got.stop_reason is sent.stop_reason
        assert (got.teacher is None) == (sent.teacher is None)
        for name in ("logprobs", "top_ids", "top_logprobs") if sent.teacher else ():
            one, other = getattr(got.teacher, name), getattr(sent.teacher, name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        assert (got.experts is None) == (sent.experts is None)
        if got.experts is not None and sent.experts is not None:
            assert got.experts.dtype == np.uint16
            np.testing.assert_array_equal(got.experts, sent.experts)
        assert (got.candidates is None) == (sent.candidates is None)
        if got.candidates is not None and sent.candidates is not None:
            np.testing.assert_array_equal(got.candidates, sent.candidates)


def test_pictures_arrive_once_with_all_their_places(tmp_path: Path) -> None:
    first, second = (draw_picture(n) for n in (1, 2))
    places = (PlacedPicture(first.sha256, (1, 4, 6), 2), PlacedPicture(second.sha256, (1, 4, 6), 9))
    one, *others = make_batch().sequences
    sequences = (
        replace(one, pictures=places),
        *others[:-1],
        replace(others[-1], pictures=places[:1]),
    )
    files = {each.sha256: each.data for each in (first, second)}
    message = through(
        protocol.write_batch(tmp_path / "batch", TrainBatch(7, sequences, pictures=files))
    )
    for found in (
        protocol.read_batch(message),
        protocol.unpack_batch(protocol.pack_batch(message)),
    ):
        assert found.pictures == files
        assert [s.pictures for s in found.sequences] == [s.pictures for s in sequences]
    assert (tmp_path / "batch").stat().st_size < sum(map(len, files.values())) + 2**14


def test_an_empty_batch_arrives_too(tmp_path: Path) -> None:
    batch = TrainBatch(1, ())
    assert protocol.read_batch(through(protocol.write_batch(tmp_path / "batch", batch))) == batch


@pytest.mark.parametrize("reference", [None, b"fingerprint"])
@pytest.mark.parametrize("experts", [None, ExpertShape(2, 300, 8)])
def test_what_was_loaded_arrives(reference: bytes | None, experts: ExpertShape | None) -> None:
    info = ModelInfo(parameters=3, vocab_size=97, step=4, reference=reference, experts=experts)
    assert protocol.decode_model_info(through(protocol.encode_model_info(info))) == info


def test_a_result_arrives_whole() -> None:
    result = StepResult(
        metrics={"policy/loss": 0.1 + 0.2},
        seconds=1.5,
        skipped=True,
        histograms={"policy/advantage": Histogram((0.0, 0.1, 2.0), (3, 4))},
        versions={12: VersionMismatch(5, 0.1, 0.2, 0.3, float("inf"))},
    )
    assert protocol.decode_step_result(through(protocol.encode_step_result(result))) == result
