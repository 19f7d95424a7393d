"""Work under way in an engine that is found torn is not used, however soon it recovers; without a
lease only repeats are taken; and with as many candidates as it asks for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.learner.v1.group_service_pb2 import SamplingParameters
from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence, Trajectory, content_digest
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.run_folder.trajectory_tables import ContentConflictError
from flotilla_learner.api.encode import lease_message
from flotilla_learner.group_types import Lease, SubmittedTry
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.groups.dispatcher_start import start_dispatcher
from flotilla_learner.groups.lease_idempotency import LeaseRequest
from flotilla_learner.groups.open_groups import LeaseLostError
from flotilla_learner.groups.trajectory_intake import Receipt
from flotilla_learner.journal.store import open_journal
from flotilla_learner.sampling.tasks import load_tasks
from tests.learner.run.test_train_loop import query
from tests.support.learner import make_config

NEWEST = PolicyId(1, 0, b"f" * 32)


@asynccontextmanager
async def leased(
    tmp_path: Path, **learner: object
) -> AsyncGenerator[tuple[GroupDispatcher, Lease]]:
    """A dispatcher whose worker `w` serves the newest policy and holds a lease."""
    config = make_config(tmp_path, lease_ttl_s=60.0, **learner)
    journal = open_journal(tmp_path / "run")
    dispatcher = await start_dispatcher(config, journal, load_tasks(Path(config.tasks)), 0)
    await dispatcher.advance_policy(NEWEST, None)
    dispatcher.book.greet_worker("w", "i", loop_time())
    await dispatcher.mark_serving("w", NEWEST)
    lease = await dispatcher.lease_group(LeaseRequest("r", "w", "i", NEWEST, 64), 5.0)
    assert lease is not None
    yield dispatcher, lease
    await journal.close()


def won(lease: Lease) -> SubmittedTry:
    """The first attempt, one token by the newest policy."""
    spans = (Span(Author.PROMPT, 1), Span(Author.POLICY, 1, NEWEST, lease.group.temperature))
    sequence = Sequence(np.array([1, 2], np.int32), spans, np.array([-1.0], np.float32))
    key = AttemptKey(lease.group.group_id, *lease.attempts[0])
    attempt = SubmittedTry(lease.lease_id, lease.worker_id, key)
    attempt.trajectory = Trajectory(
        *(key, lease.lease_id, (sequence,), content_digest([sequence])),
        reward=1.0,
        stop_reason=StopReason.DONE,
    )
    return attempt


async def torn_and_mended(dispatcher: GroupDispatcher) -> None:
    await dispatcher.mark_not_serving("w", NEWEST)
    await dispatcher.mark_serving("w", NEWEST)


def unused(tmp_path: Path, dispatcher: GroupDispatcher, lease: Lease) -> bool:
    """Return whether the try is dropped, and the attempt waits for its next one."""
    key = AttemptKey(lease.group.group_id, *lease.attempts[0])
    assert dispatcher.book.waits_for(key)
    return query(tmp_path, "SELECT dropped FROM trajectories") == [("unverified_policy",)]


async def test_what_waits_for_a_report_is_not_used_after_the_engine_was_refused(
    tmp_path: Path,
) -> None:
    async with leased(tmp_path) as (dispatcher, lease):
        dispatcher.book.workers["w"].served.clear()
        submitting = asyncio.create_task(dispatcher.intake.submit_try(won(lease)))
        await asyncio.sleep(0.05)
        await torn_and_mended(dispatcher)
        await submitting
        assert unused(tmp_path, dispatcher, lease)


async def test_what_is_being_written_is_not_used_after_the_engine_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leased(tmp_path) as (dispatcher, lease):
        journal: Any = dispatcher.endings.journal
        receive = journal.add_trajectory

        async def slowly(*arguments: Any) -> bool:
            new = await receive(*arguments)
            await torn_and_mended(dispatcher)
            return new

        monkeypatch.setattr(journal, "add_trajectory", slowly)
        await dispatcher.intake.submit_try(won(lease))
        assert unused(tmp_path, dispatcher, lease)


async def test_what_a_trusted_engine_wrote_is_used(tmp_path: Path) -> None:
    async with leased(tmp_path) as (dispatcher, lease):
        await dispatcher.intake.submit_try(won(lease))
        assert query(tmp_path, "SELECT dropped FROM trajectories") == [("",)]


async def test_without_a_lease_only_a_repeat_of_the_same_content_is_taken(tmp_path: Path) -> None:
    async with leased(tmp_path) as (dispatcher, lease):
        await dispatcher.intake.submit_try(won(lease))
        await dispatcher.release_leases("w", [lease.lease_id])
        assert await dispatcher.intake.submit_try(won(lease)) == Receipt(True, group_complete=True)
        other, next_try = won(lease), won(lease)
        other.trajectory = replace(other.trajectory, reward=0.0)
        with pytest.raises(ContentConflictError):
            await dispatcher.intake.submit_try(other)
        next_try.key = replace(next_try.key, attempt_try=1)
        with pytest.raises(LeaseLostError):
            await dispatcher.intake.submit_try(next_try)
        assert query(tmp_path, "SELECT try, reward FROM trajectories") == [(0, 1.0)]


def asked_sampling(lease: Lease) -> SamplingParameters:
    """Return the sampling that a lease's message asks of a worker."""
    seeds = range(len(lease.attempts))
    times: dict[str, Any] = {"remaining_s": 1.0, "ttl_s": 1.0}
    return lease_message(lease, seeds, run_epoch=1, tries=1, **times).sampling


def naming(attempt: SubmittedTry, columns: int) -> SubmittedTry:
    """Return the try with so many candidates of its token."""
    (sequence,) = attempt.trajectory.sequences
    candidates = np.arange(2, 2 + columns, dtype=np.int32)[None]
    held = (replace(sequence, candidates=candidates),)
    attempt.trajectory = replace(
        attempt.trajectory, sequences=held, content_digest=content_digest(held)
    )
    return attempt


async def test_a_lease_asks_for_candidates_and_only_as_many_are_taken(tmp_path: Path) -> None:
    async with leased(tmp_path, top_k=3, top_p=0.9) as (dispatcher, lease):
        asked = asked_sampling(lease)
        assert (asked.top_k, asked.top_p) == (3, pytest.approx(0.9))
        for other, named in ((won(lease), 0), (naming(won(lease), 2), 2)):
            with pytest.raises(ValueError, match=f"{named} candidates of each token.* asks for 3"):
                await dispatcher.intake.submit_try(other)
        await dispatcher.intake.submit_try(naming(won(lease), 3))
        (stored,) = await dispatcher.endings.journal.load_trajectories([won(lease).key])
        held = stored.sequences[0].candidates
        assert held is not None and held.tolist() == [[2, 3, 4]]


async def test_without_top_k_no_candidates_are_asked_for_or_taken(tmp_path: Path) -> None:
    async with leased(tmp_path) as (dispatcher, lease):
        asked = asked_sampling(lease)
        assert not asked.HasField("top_k") and not asked.HasField("top_p")
        with pytest.raises(
            ValueError, match="3 candidates of each token, but the lease asks for 0"
        ):
            await dispatcher.intake.submit_try(naming(won(lease), 3))
