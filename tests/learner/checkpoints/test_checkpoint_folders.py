"""Conditions for a start to take a checkpoint's folder, and the fate of the others."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from flotilla_learner.checkpoints.checkpoint_folders import Checkpoints, CheckpointWriteError
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.ports import RankError
from flotilla_learner.run_files.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    ForeignCheckpointError,
    verify_checkpoint,
)
from flotilla_learner.types import CheckpointFiles
from tests.support.fake_ranks import FakeRanks

MODEL = "model.bin"


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    opened = open_journal(tmp_path, "a-run")
    await opened.begin_epoch(at_least=3)
    yield opened
    await opened.close()


@pytest.fixture
def checkpoints(tmp_path: Path, journal: Journal) -> Checkpoints:
    return Checkpoints(tmp_path, journal, CheckpointUploads(), run_id="a-run", run_epoch=3, keep=2)


async def save(checkpoints: Checkpoints, *steps: int) -> FakeRanks:
    ranks = FakeRanks(checkpoints.folder.parent / "weights")
    for step in steps:
        ranks.step = step
        await checkpoints.begin_save(ranks, step)
        await checkpoints.finish_save()
    return ranks


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


async def test_a_checkpoint_names_and_hashes_its_files(checkpoints: Checkpoints) -> None:
    await save(checkpoints, 1)
    found = verify_checkpoint(checkpoints.folder / "step-000001")
    assert (found.run_id, found.run_epoch, found.step) == ("a-run", 3, 1)
    assert set(found.files) == {MODEL}
    assert found.files[MODEL].bytes == (checkpoints.folder / "step-000001" / MODEL).stat().st_size


async def test_as_many_are_kept_as_should_be(checkpoints: Checkpoints) -> None:
    await save(checkpoints, 1, 2, 3)
    assert names(checkpoints) == ["step-000002", "step-000003"]
    newest = await checkpoints.find_newest()
    assert newest is not None
    assert newest.step == 3


def cut(folder: Path) -> None:
    path = folder / MODEL
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path, name: str = MODEL) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is cut off": (cut, "model.bin has 135 bytes instead of 136"),
    "a bit has flipped": (flip, "model.bin has changed"),
    "a file is gone": (lambda folder: (folder / MODEL).unlink(), "model.bin cannot be read"),
    "a bit of the manifest": (lambda folder: flip(folder, MANIFEST), "manifest.json has changed"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json cannot be read"),
    "no folder": (shutil.rmtree, "manifest.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_newest_one_is_an_incident_and_the_one_before_is_taken(
    checkpoints: Checkpoints, journal: Journal, damage: str
) -> None:
    await save(checkpoints, 1, 2)
    harm, message = DAMAGES[damage]
    harm(checkpoints.folder / "step-000002")
    newest = await checkpoints.find_newest()
    assert newest is not None
    assert newest.step == 1
    assert journal.incidents.counts == {"damaged_checkpoint": 1}
    assert message in journal.incidents.newest[0].text
    assert [row.step for row in await journal.list_checkpoints()] == [1]
    await save(checkpoints, 2)
    assert verify_checkpoint(checkpoints.folder / "step-000002").step == 2


async def test_when_all_are_damaged_there_is_none(
    checkpoints: Checkpoints, journal: Journal
) -> None:
    await save(checkpoints, 1, 2)
    for step in (1, 2):
        flip(checkpoints.folder / f"step-{step:06d}")
    assert await checkpoints.find_newest() is None
    assert journal.incidents.counts["damaged_checkpoint"] == 2
    assert [row.step for row in await journal.list_checkpoints()] == [2, 1], "none is forgotten"


async def test_leftovers_of_killed_starts_are_removed(checkpoints: Checkpoints) -> None:
    await save(checkpoints, 2)
    for name in ("step-000004.tmp-2", "step-000004", "step-000001"):
        shutil.copytree(checkpoints.folder / "step-000002", checkpoints.folder / name)
    (checkpoints.folder / "mine").mkdir()
    newest = await checkpoints.find_newest()
    assert newest is not None
    assert newest.step == 2
    assert names(checkpoints) == ["mine", "step-000002"]


def write_half(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / MODEL).write_bytes(b"half")


class FullRanks(FakeRanks):
    """The disk takes half of what they write."""

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        return asyncio.create_task(self.run_full(directory))

    async def run_full(self, directory: Path) -> CheckpointFiles:
        write_half(directory)
        raise RankError("saved: OSError: [Errno 28] No space left on device")


async def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_harms_nothing(
    checkpoints: Checkpoints, journal: Journal, tmp_path: Path
) -> None:
    await save(checkpoints, 1)
    with pytest.raises(CheckpointWriteError, match=r"step 2 cannot be written.*No space left"):
        await checkpoints.begin_save(FullRanks(tmp_path / "weights"), 2)
        await checkpoints.wait_until_failed()
    assert names(checkpoints) == ["step-000001"]
    assert journal.incidents.counts == {"checkpoint_failed": 1}
    newest = await checkpoints.find_newest()
    assert newest is not None
    assert newest.step == 1


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def test_a_checkpoint_of_a_newer_program_is_refused(checkpoints: Checkpoints) -> None:
    await save(checkpoints, 1)
    folder = checkpoints.folder / "step-000001"
    rewrite(folder, format=3)
    with pytest.raises(
        ForeignCheckpointError, match="has format 3, but this program reads and writes"
    ):
        verify_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 2}', "{" * 20])
async def test_what_is_no_manifest_is_damage(checkpoints: Checkpoints, text: str) -> None:
    await save(checkpoints, 1)
    folder = checkpoints.folder / "step-000001"
    (folder / MANIFEST).write_text(text)
    with pytest.raises(DamagedCheckpointError, match="is not a manifest"):
        verify_checkpoint(folder)


async def test_a_learner_of_an_older_epoch_can_put_no_checkpoint_in_place(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    await save(checkpoints, 1)
    (tmp_path / "journal.lock").unlink()
    successor = open_journal(tmp_path, "a-run")
    await successor.begin_epoch(at_least=1)
    with pytest.raises(Exception, match="in epoch 4: this one, of epoch 3, ends"):
        await save(checkpoints, 2)
    assert [row.step for row in await successor.list_checkpoints()] == [1]
    assert not (checkpoints.folder / "step-000002").exists()
    await successor.close()
