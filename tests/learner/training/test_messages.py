"""Batches and scores keep their values however they are spread over messages."""

from collections.abc import AsyncIterator, Iterable

import numpy as np
import pytest

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla_learner.training import messages
from flotilla_learner.training.batch_checks import SequenceLimits
from flotilla_learner.training.messages import encode_scores, read_batch
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training_types import TargetScores
from tests.support.target_batches import make_batch
from tests.support.training_process import encode_batch, encode_sequence

LIMITS = SequenceLimits(64, 97)


async def stream(
    requests: Iterable[pb.ForwardBackwardRequest],
) -> AsyncIterator[pb.ForwardBackwardRequest]:
    for request in requests:
        yield request


def split(whole: pb.LossSequence) -> list[pb.LossSequence]:
    """Return a sequence in two messages, cut anywhere in its arrays."""
    inputs = dict(whole.inputs)
    return [
        pb.LossSequence(
            token_ids=whole.token_ids[:7],
            target_ids=whole.target_ids[:21],
            targets=whole.targets,
            inputs={name: data[:3] for name, data in inputs.items()},
            continued=True,
        ),
        pb.LossSequence(
            token_ids=whole.token_ids[7:],
            target_ids=whole.target_ids[21:],
            inputs={name: data[3:] for name, data in inputs.items()},
        ),
    ]


async def test_a_batch_is_read_as_it_was_written() -> None:
    batch = make_batch(targets=3)
    requests = list(encode_batch("m", 4, batch))
    assert len(requests) == 2
    cut = [pb.ForwardBackwardRequest() for _ in requests]
    for request, other in zip(requests, cut, strict=True):
        other.CopyFrom(request)
        del other.sequences[:]
        other.sequences.extend(part for each in request.sequences for part in split(each))
    for sent in (requests, cut):
        operation, found = await read_batch(stream(sent), LIMITS)
        assert (operation.model_id, operation.number) == ("m", 4)
        for one, other in zip(found.sequences, batch.sequences, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.target_ids, other.target_ids)
            np.testing.assert_array_equal(one.inputs["weights"], other.inputs["weights"])


@pytest.mark.parametrize("sent", [1, 3])
async def test_a_batch_of_another_number_of_sequences_than_its_stream_is_refused(sent: int) -> None:
    first, second = encode_batch("m", 4, make_batch())
    with pytest.raises(OperationRefused, match=r"\d sequences, and 4 by `count`"):
        await read_batch(stream([first, second, second][:sent]), LIMITS)


@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_batch_without_a_whole_sequence_is_refused(cut_off: bool) -> None:
    parts = split(encode_sequence(make_batch().sequences[0]))[:1] if cut_off else []
    request = pb.ForwardBackwardRequest(loss="cross_entropy", sequences=parts)
    with pytest.raises(OperationRefused, match="cut off" if cut_off else "no sequences"):
        await read_batch(stream([request]), LIMITS)
    with pytest.raises(OperationRefused, match="no sequences"):
        await read_batch(stream([]), LIMITS)


@pytest.mark.parametrize("size", [4, 12, 40, 1000])
def test_scores_are_joined_from_responses_of_limited_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_RESPONSE_BYTES", size)
    values = [np.arange(n, dtype=np.float32) for n in (3, 7, 1, 10)]
    responses = list(encode_scores(TargetScores(values, {"loss:sum": 2.5})))
    assert [dict(each.metrics) for each in responses if each.metrics] == [{"loss:sum": 2.5}]
    assert responses[-1].metrics
    found: list[bytes] = []
    joins = False
    for response in responses:
        assert sum(map(len, response.logprobs)) <= size
        first, *more = response.logprobs
        found = [*found[:-1], found[-1] + first, *more] if joins else [*found, first, *more]
        joins = response.continued
    assert not joins
    assert found == [each.tobytes() for each in values]
