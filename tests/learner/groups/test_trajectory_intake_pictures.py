"""Pictures are journaled once for their group, with the first trajectory that shows them, and go
with it to the ranks; what is lost or damaged is found, and never trained on."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.rpc.rpc import service_error
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.picture_tables import picture_of, whole_trajectories_of
from flotilla_common.run_folder.trajectory_tables import keys_of
from flotilla_learner.checkpoints.remote_staging import snapshot
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.store import open_journal
from tests.learner.run.test_train_loop import lease_for, query, rows_of
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import Submission, graded, learner, make_config
from tests.support.pictures import FAMILY, SeeingWorker, draw_picture, first_picture, showing

STORED = "SELECT group_id, sha256 FROM pictures"


@asynccontextmanager
async def watching(
    tmp_path: Path, ranks: FakeRanks | None = None, **changes: Any
) -> AsyncGenerator[SeeingWorker]:
    """A learner, and a worker that does nothing by itself; both are gone at the end."""
    config = make_config(tmp_path, **changes)
    async with learner(tmp_path, config, ranks, vision=FAMILY) as running:
        worker = SeeingWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        yield worker
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()


async def run_whole(tmp_path: Path, ranks: FakeRanks | None = None, **changes: Any) -> Any:
    config = make_config(tmp_path, **changes)
    async with (
        learner(tmp_path, config, ranks, vision=FAMILY) as running,
        SeeingWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 90)
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def seen(lease: pb.Lease, worker: SeeingWorker, number: int = 0) -> Submission:
    return graded(lease, lease.attempts[number], worker.policy, reward=float(number))


async def refusal(worker: SeeingWorker, submission: Submission) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.submit(submission)
    found = service_error(caught.value)
    assert found is not None
    return found.reason, found.message


def change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "run" / JOURNAL_FILE)) as db:
        assert db.execute(sql).rowcount, sql
        db.commit()


async def test_a_run_trains_on_the_pictures_that_its_attempts_show(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path / "weights")
    summary = await run_whole(tmp_path, ranks, checkpoint={"every": 10})
    assert summary["trajectories"]["trained"] == 18
    assert len(ranks.trained) == 3
    for batch in ranks.trained:
        shown = [place.sha256 for sequence in batch.sequences for place in sequence.pictures]
        assert len(shown) == 12
        # One of the group and one of each attempt.
        assert {*batch.pictures} == {*shown}
        assert len(batch.pictures) == 9
        for sequence in batch.sequences:
            first, second = sequence.pictures
            assert first.sha256 == first_picture(sequence.group_id).sha256
            assert (first.grid, second.grid) == ((1, 4, 6), (1, 2, 2))
            assert (sequence.token_ids[first.offset :][:6] == FAMILY.image_pad).all()
            assert sequence.token_ids[second.offset] == FAMILY.image_pad
    stored = query(tmp_path, STORED)
    played = query(tmp_path, "SELECT DISTINCT group_id FROM trajectories")
    tries = query(tmp_path, "SELECT count(*) FROM trajectories")[0][0]
    assert len(stored) == len(played) + tries
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        assert audit_journal(db).holds
        for group, sha256 in stored:
            assert picture_of(db, group, sha256)


async def test_a_picture_of_the_group_need_not_be_sent_again_and_one_of_another_group_must(
    tmp_path: Path,
) -> None:
    picture = draw_picture(1)
    async with watching(tmp_path) as worker:
        lease, other = [await lease_for(worker, pb.PURPOSE_TRAIN) for _ in range(2)]
        reason, message = await refusal(worker, showing(seen(lease, worker), [picture], sent=[]))
        assert reason == "PICTURE_MISSING"
        assert f"picture {picture.sha256[:12]} is not journaled for group" in message
        assert query(tmp_path, "SELECT * FROM trajectories") == []
        await worker.submit(showing(seen(lease, worker), [picture]))
        await worker.submit(showing(seen(lease, worker, 1), [picture], sent=[]))
        assert query(tmp_path, STORED) == [(lease.group_id, picture.sha256)]
        reason, _ = await refusal(worker, showing(seen(other, worker), [picture], sent=[]))
        assert reason == "PICTURE_MISSING"
        again = await worker.submit(showing(seen(lease, worker), [picture], sent=[]))
        assert again.repeated_submission


async def test_a_known_picture_with_another_grid_is_refused(tmp_path: Path) -> None:
    picture = draw_picture(1)
    async with watching(tmp_path) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.submit(showing(seen(lease, worker), [picture]))
        made = showing(seen(lease, worker, 1), [picture], sent=[])
        made.header.sequences[0].media[0].grid[:] = [1, 6, 4]
        reason, message = await refusal(worker, made)
        assert reason == "MALFORMED_TRAJECTORY"
        assert "has grid [1, 6, 4], but [1, 4, 6] in other trajectories" in message
        assert query(tmp_path, "SELECT count(*) FROM trajectories") == [(1,)]


DAMAGES = {
    "changed": "UPDATE pictures SET data = CAST(x'ff' || substr(data, 2) AS BLOB)",
    "cut short": "UPDATE pictures SET data = CAST(substr(data, 1, 9) AS BLOB)",
    "swapped": (
        "UPDATE pictures SET data ="
        " (SELECT p.data FROM pictures p WHERE p.sha256 != pictures.sha256 LIMIT 1)"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_group_with_a_damaged_picture_is_dropped_and_others_take_its_place(
    tmp_path: Path, damage: str
) -> None:
    ranks = FakeRanks(tmp_path / "weights")
    async with watching(tmp_path, ranks, steps=1) as worker:
        bad = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.play(bad)
        sha256 = first_picture(bad.group_id).sha256
        change(tmp_path, f"{DAMAGES[damage]} WHERE sha256 = '{sha256}'")
        for _ in range(3):
            await worker.play(await lease_for(worker, pb.PURPOSE_TRAIN))
        await rows_of(tmp_path, "SELECT * FROM plans")
        for _ in range(1000):
            if ranks.trained:
                break
            await asyncio.sleep(0.01)
    (batch,) = ranks.trained
    assert bad.group_id not in {sequence.group_id for sequence in batch.sequences}
    assert len({sequence.group_id for sequence in batch.sequences}) == 3
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        found = audit_journal(db)
    assert found.fates["dropped/corrupt_record"] == 2
    assert found.damaged == 2


async def test_a_damaged_picture_of_a_group_that_waits_is_found_at_the_next_start(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path, steps=1) as worker:
        bad = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.play(bad)
    own = query(tmp_path, f"{STORED} ORDER BY sha256")
    change(tmp_path, f"{DAMAGES['changed']} WHERE sha256 = '{own[0][1]}'")
    summary = await run_whole(tmp_path, steps=1)
    assert summary["trajectories"]["trained"] == 6
    lost = 2 if own[0][1] == first_picture(bad.group_id).sha256 else 1
    assert summary["trajectories"]["dropped/corrupt_record"] == lost


async def test_pictures_go_with_the_arrays_of_their_group(tmp_path: Path) -> None:
    await run_whole(tmp_path, steps=6, checkpoint={"every": 1, "keep": 1})
    kept = "SELECT DISTINCT group_id FROM trajectories WHERE payload IS NOT NULL ORDER BY 1"
    assert query(tmp_path, "SELECT DISTINCT group_id FROM pictures ORDER BY 1") == query(
        tmp_path, kept
    )
    assert len(query(tmp_path, kept)) < len(query(tmp_path, "SELECT DISTINCT group_id FROM groups"))
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        assert audit_journal(db).holds
    await open_journal(tmp_path / "run").close()


async def test_a_copy_for_a_store_has_only_the_pictures_of_samples_not_yet_trained_on(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path, steps=2, checkpoint={"every": 1}) as worker:
        for _ in range(3):
            await worker.play(await lease_for(worker, pb.PURPOSE_TRAIN))
        await rows_of(tmp_path, "SELECT * FROM checkpoints WHERE step = 1")
        waiting = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.play(waiting)
    copy = tmp_path / "copy"
    copy.mkdir()
    snapshot(tmp_path / "run" / JOURNAL_FILE, copy / JOURNAL_FILE, 1, lambda: None)
    with closing(sqlite3.connect(copy / JOURNAL_FILE)) as db:
        assert db.execute("SELECT DISTINCT group_id FROM pictures").fetchall() == [
            (waiting.group_id,)
        ]
        found, damaged = whole_trajectories_of(db, keys_of(db, waiting.group_id))
    assert (len(found), damaged) == (2, [])
    assert len({id(each.pictures[first_picture(waiting.group_id).sha256]) for each in found}) == 1


async def test_a_run_that_stopped_resumes_with_the_pictures_of_what_waits(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path / "weights")
    async with watching(tmp_path, steps=1) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.play(lease)
    summary = await run_whole(tmp_path, ranks, steps=1)
    assert summary["trajectories"]["trained"] == 6
    (batch,) = ranks.trained
    assert lease.group_id in {sequence.group_id for sequence in batch.sequences}
    assert len(batch.pictures) == 9
