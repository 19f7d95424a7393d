"""Samples of a batch that are scored again, in the form that the ranks take."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile, zip_longest

from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.groups.batcher import make_train_sequence
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.journal.store import Journal
from flotilla_learner.types import TrainSequence


@dataclass(frozen=True, slots=True)
class RescoredSample:
    """A sequence to score, the worker whose engine wrote it, and the files of its attempt's
    pictures."""

    sequence: TrainSequence
    worker_id: str
    pictures: Mapping[str, bytes]


def interleave_attempts(groups: Sequence[ReadyGroup]) -> Iterator[AttemptRecord]:
    """Iterate over the first attempt of every group, then the second of each, and so on.

    A group is mostly one engine's work, so this covers every engine before repeating any."""
    rounds = zip_longest(*(group.graded for group in groups))
    return (record for record in chain.from_iterable(rounds) if record is not None)


async def load_samples(
    journal: Journal,
    records: Iterator[AttemptRecord],
    version: int,
    *,
    epoch: int | None,
    tokens: int,
) -> list[RescoredSample]:
    """Load at most so many policy tokens, but at least one sequence if there is any.

    With an `epoch`, only those that its own engines sampled from `version`, the newest."""
    found: list[RescoredSample] = []
    async for sample in _iter_samples(journal, records, version, epoch):
        count = int(sample.sequence.policy_mask.sum())
        if found and count > tokens:
            break
        found.append(sample)
        tokens -= count
    return found


async def _iter_samples(
    journal: Journal, records: Iterator[AttemptRecord], version: int, epoch: int | None
) -> AsyncIterator[RescoredSample]:
    for record in records:
        if epoch is not None and record.newest_version != version:
            continue
        for trajectory in await journal.load_trajectories([record.trajectory.key]):
            for sequence in trajectory.sequences:
                first = _first_policy(sequence)
                if first is None or (epoch is not None and first != PolicyId(epoch, version)):
                    continue
                row = _to_train_sequence(trajectory, sequence, first, version)
                yield RescoredSample(row, trajectory.facts.worker_id, trajectory.pictures)


def _first_policy(sequence: Sampled) -> PolicyId | None:
    return next((span.policy for span in sequence.spans if span.policy is not None), None)


def _to_train_sequence(
    trajectory: Trajectory, sequence: Sampled, first: PolicyId, version: int
) -> TrainSequence:
    """Return the sequence up to where other weights took over: what follows was computed on a
    cache that both had filled, so no single version explains it."""
    kept = list(takewhile(lambda span: span.policy in (None, first), sequence.spans))
    end = sum(span.length for span in kept)
    sampled = sum(span.length for span in kept if span.policy is not None)
    staleness = version - first.version
    row = make_train_sequence(trajectory, trajectory.reward or 0.0, sequence, staleness)
    return replace(
        row,
        token_ids=row.token_ids[:end],
        policy_mask=row.policy_mask[:end],
        behaviour_logprobs=row.behaviour_logprobs[:end],
        experts=None if row.experts is None else row.experts[:end],
        candidates=None if row.candidates is None else row.candidates[:sampled],
        pictures=tuple(place for place in row.pictures if place.offset < end),
    )
