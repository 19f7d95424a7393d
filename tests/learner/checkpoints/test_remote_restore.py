"""A run that resumes from the store: in another folder, or not at all."""

import fcntl
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.checkpoints import restore_command as command
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore, open_store
from flotilla_learner.checkpoints.remote_layout import Marker, Stamp
from flotilla_learner.checkpoints.remote_restore import RestoreError, restore
from flotilla_learner.checkpoints.remote_upload import Uploader
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.store import open_journal
from flotilla_learner.ports import RemoteStoreError
from tests.support.remote_checkpoints import RUN_ID, UploadingMachine, no_wait, query, unreliable


def garble(store: FsspecStore, name: str) -> None:
    data = store.read(name) or b""
    store.write(name, bytes([data[0] ^ 1]) + data[1:])


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


async def test_the_newest_checkpoint_is_restored_with_journal_spec_and_metrics(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    await machine.make(10)
    row = await machine.make(20)
    lines = [json.dumps({"step": step}) + "\n" for step in (19, 20, 21)]
    (machine.run_dir / "metrics.jsonl").write_text("".join(lines) + '{"step": 2')
    machine.uploader.upload(machine.stage(row))
    restored = restore(store, tmp_path / "new", name="test")
    assert (restored.run_id, restored.step, restored.lost) == (RUN_ID, 20, 0)
    run_dir = tmp_path / "new" / RUN_ID
    assert files(run_dir) == [
        "checkpoints/step-000020/model.bin",
        "checkpoints/step-000020/sub/more.bin",
        "journal.mark",
        "journal.sqlite",
        "metrics.jsonl",
        "spec.json",
    ]
    assert (run_dir / "metrics.jsonl").read_text() == "".join(lines[:2])
    where = str(run_dir / "checkpoints" / "step-000020")
    assert query(run_dir, "SELECT step, directory FROM checkpoints") == [(20, where)]
    assert os.listdir(tmp_path / "new") == [RUN_ID]


async def test_a_restore_for_reading_leaves_out_the_model(
    store: FsspecStore, tmp_path: Path
) -> None:
    await UploadingMachine(tmp_path / "old", store).upload(20)
    restored = restore(store, tmp_path / "new", name="test", for_reading=True)
    assert (restored.run_id, restored.step) == (RUN_ID, 20)
    found = files(tmp_path / "new" / RUN_ID)
    assert found == ["journal.mark", "journal.sqlite", "spec.json"]


async def test_steps_that_were_planned_while_it_was_written_are_not_lost(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    row = await machine.make(20)
    journal = open_journal(machine.run_dir, RUN_ID)
    for step in (21, 22):
        await journal.commit_plan(Plan(step, ()), 1, [], [])
    await journal.set_meta({"tracker": {"id": "a", "step": 21}})
    await journal.close()
    lines = [json.dumps({"step": step}) + "\n" for step in (19, 20, 21, 22)]
    (machine.run_dir / "metrics.jsonl").write_text("".join(lines))
    machine.uploader.upload(machine.stage(row))
    machine.note(acknowledged=0, step=24)
    restored = restore(store, tmp_path / "new", name="test")
    assert (restored.step, restored.lost_steps) == (20, 2)
    run_dir = tmp_path / "new" / RUN_ID
    assert query(run_dir, "SELECT step FROM plans") == [(21,), (22,)]
    # A start trains both again, and logs the second alone.
    assert (run_dir / "metrics.jsonl").read_text() == "".join(lines[:3])


async def test_the_next_start_has_an_epoch_above_every_one_that_ever_began(
    store: FsspecStore, tmp_path: Path
) -> None:
    await UploadingMachine(tmp_path / "old", store, run_epoch=3).upload(20)
    marker = Marker(6, "began-and-died", 20)
    store.write(marker.name, marker.encode())
    restore(store, tmp_path / "new", name="test")
    journal = open_journal(tmp_path / "new" / RUN_ID)
    try:
        assert await journal.begin_epoch(at_least=1) == 7
        assert (await journal.load_forks())[7] == 20
    finally:
        await journal.close()


async def test_what_the_disk_took_along_is_counted_over_all_disks(
    store: FsspecStore, tmp_path: Path
) -> None:
    first = UploadingMachine(tmp_path / "first", store)
    await first.upload(20)
    first.note(acknowledged=30, step=23)
    restored = restore(store, tmp_path / "second", name="test")
    assert (restored.lost, restored.lost_steps) == (30, 3)
    second = UploadingMachine(tmp_path / "second" / RUN_ID, store, run_epoch=2)
    # This one sampled 20 tries more, and its disk goes too, before it has uploaded anything.
    second.note(acknowledged=50, step=22)
    assert restore(store, tmp_path / "third", name="test").lost == 50
    meta = dict(query(tmp_path / "third" / RUN_ID, "SELECT key, value FROM meta"))
    assert json.loads(meta["lost_with_disk"]) == 50


@pytest.mark.parametrize("what", ["checkpoints/{}/ranks/model.bin", "manifests/{}.json"])
async def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_taken(
    store: FsspecStore, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    for step in (10, 20):
        await machine.upload(step)
    garble(store, what.format(Stamp(1, 20)))
    assert restore(store, tmp_path / "new", name="test").step == 10
    out, err = capfd.readouterr()
    assert "a remote checkpoint is damaged, trying another" in out + err


# A manifest, the size of a file, and the file itself.
@pytest.mark.parametrize("start", ["read manifests/", "size checkpoints/", "download checkpoints/"])
async def test_a_checkpoint_that_is_replaced_while_it_is_read_makes_way_for_the_newer_one(
    store: FsspecStore, tmp_path: Path, start: str
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    uploader = Uploader(store, machine.who, machine.run_dir, keep=1, wait=no_wait)
    uploader.upload(machine.stage(await machine.make(10)))
    coming = [machine.stage(await machine.make(step)) for step in (20, 30)]

    def go_on(call: str, what: str) -> None:
        if coming and f"{call} {what}".startswith(start):
            uploader.upload(coming.pop(0))

    assert restore(unreliable(store, go_on), tmp_path / "new", name="test").step == 30
    assert not coming


async def test_nothing_is_restored_where_every_checkpoint_is_damaged(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    for step in (10, 20):
        await machine.upload(step)
    garble(store, f"checkpoints/{Stamp(1, 20)}/spec.json")
    store.remove([f"checkpoints/{Stamp(1, 10)}/ranks/sub/more.bin"])
    with pytest.raises(RestoreError) as caught:
        restore(store, tmp_path / "new", name="test")
    for why in ("has no intact checkpoint", "spec.json differs from what was", "bin is missing"):
        assert why in str(caught.value)
    assert os.listdir(tmp_path / "new") == []


async def test_checkpoints_of_a_zombie_are_not_restored(store: FsspecStore, tmp_path: Path) -> None:
    zombie = UploadingMachine(tmp_path / "old", store, run_epoch=3)
    for step in (20, 30):
        await zombie.upload(step)
    marker = Marker(4, "other", 20)
    store.write(marker.name, marker.encode())
    assert restore(store, tmp_path / "new", name="test").step == 20


async def test_a_run_that_is_here_already_is_not_overwritten(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / RUN_ID, store)
    await machine.upload(20)
    await machine.make(30)
    with pytest.raises(RestoreError, match=f"resume it with `--resume {RUN_ID}`"):
        restore(store, tmp_path, name="test")
    assert query(machine.run_dir, "SELECT max(step) FROM checkpoints") == [(30,)]


async def test_two_do_not_restore_the_same_run_to_the_same_folder_at_once(
    store: FsspecStore, tmp_path: Path
) -> None:
    await UploadingMachine(tmp_path / "old", store).upload(20)
    folder = tmp_path / "new" / f".{RUN_ID}.restoring"
    folder.mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RestoreError, match="another process is restoring this run there"):
            restore(store, tmp_path / "new", name="test")
    finally:
        os.close(handle)
    # The folder of a killed restore does not hinder another.
    (folder / "left").write_text("over")
    assert restore(store, tmp_path / "new", name="test").step == 20


def edit_manifest(store: FsspecStore, stamp: Stamp, **fields: Any) -> None:
    data = json.loads(store.read(stamp.manifest) or b"")
    store.write(stamp.manifest, json.dumps({**data, **fields}).encode())


async def test_a_journal_of_another_schema_is_refused(store: FsspecStore, tmp_path: Path) -> None:
    stamp = (await UploadingMachine(tmp_path / "old", store).upload(20)).stamp
    edit_manifest(store, stamp, schema_version="999")
    with pytest.raises(RestoreError, match=r"its journal has format 999, but flotilla .* reads"):
        restore(store, tmp_path / "new", name="test")


async def test_a_run_of_another_spec_is_refused(store: FsspecStore, tmp_path: Path) -> None:
    await UploadingMachine(tmp_path / "old", store).upload(20)
    with pytest.raises(RestoreError, match="is a run of spec 'test', not of 'mine'"):
        restore(store, tmp_path / "new", name="mine")
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("run_id", ["../../etc", "/etc", "", "a/b", "-x", "A", "x" * 300])
async def test_a_run_id_that_could_leave_the_folder_is_refused(
    store: FsspecStore, tmp_path: Path, run_id: str
) -> None:
    stamp = (await UploadingMachine(tmp_path / "old", store).upload(20)).stamp
    edit_manifest(store, stamp, run_id=run_id)
    with pytest.raises(RestoreError, match="is not a run id"):
        restore(store, tmp_path / "new", name="test")


async def test_a_folder_of_runs_is_not_taken_for_a_run(store: FsspecStore, tmp_path: Path) -> None:
    await UploadingMachine(tmp_path / "old", store).upload(20)
    parent = open_store(store.url.rpartition("/")[0], {})
    with pytest.raises(RestoreError, match=f"holds runs, not one: name it, as in .*/{RUN_ID}"):
        restore(parent, tmp_path / "new", name="test")
    nothing = open_store(f"{parent.url}/nothing", {})
    with pytest.raises(RestoreError, match="no run has a checkpoint there"):
        restore(nothing, tmp_path / "new", name="test")
    marker = Marker(1, "a", 0)
    nothing.write(marker.name, marker.encode())
    with pytest.raises(RestoreError, match="ended before its first checkpoint was uploaded"):
        restore(nothing, tmp_path / "new", name="test")
    nothing.remove([marker.name])


async def test_a_journal_without_the_checkpoints_step_is_damage(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    staged = machine.stage(await machine.make(20))
    with closing(sqlite3.connect(staged.folder / JOURNAL_FILE)) as db, db:
        db.execute("DELETE FROM checkpoints")
    machine.uploader.upload(staged)
    with pytest.raises(RestoreError, match="its journal does not know step 20"):
        restore(store, tmp_path / "new", name="test")


async def test_a_journal_that_puts_its_checkpoint_elsewhere_is_damage(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path / "old", store)
    staged = machine.stage(await machine.make(20))
    with closing(sqlite3.connect(staged.folder / JOURNAL_FILE)) as db, db:
        db.execute("UPDATE checkpoints SET directory = '/runs/run/checkpoints/..'")
    machine.uploader.upload(staged)
    with pytest.raises(RestoreError, match="is not the name of a file below its folder"):
        restore(store, tmp_path / "new", name="test")
    assert list((tmp_path / "new").iterdir()) == []


def spec_file(folder: Path, **checkpoint: Any) -> Path:
    learner = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2}
    policy = {"model": "m", "max_model_len": 8}
    spec = {"name": "test", "policy": policy, "learner": {**learner, "checkpoint": checkpoint}}
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


async def test_the_command_restores_from_s3_and_reports_it(
    s3: FsspecStore, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await UploadingMachine(tmp_path / "old", s3).upload(20)
    spec = spec_file(tmp_path, remote_options={"endpoint_url": endpoint})
    arguments = ["--config", str(spec), "--runs", str(tmp_path / "new")]
    assert command.main([s3.url, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    assert (tmp_path / "new" / RUN_ID / "journal.sqlite").exists()
    assert command.main([s3.url, *arguments]) == 2
    assert "already exists" in capsys.readouterr().err
    assert command.main(["s3://no-such-bucket/x", *arguments]) == 2
    assert "cannot resume from s3://no-such-bucket/x" in capsys.readouterr().err


async def test_a_store_out_of_reach_differs_from_one_that_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*arguments: Any, **options: Any) -> None:
        raise RemoteStoreError("connection refused")

    monkeypatch.setattr(command, "restore", away)
    arguments = ["--config", str(spec_file(tmp_path)), "--runs", str(tmp_path / "new")]
    assert command.main(["memory://x", *arguments]) == 3
    assert "cannot reach memory://x: connection refused" in capsys.readouterr().err
    assert command.main(["gopher://x", *arguments]) == 2
    assert "Protocol not known: gopher" in capsys.readouterr().err


async def test_no_permission_is_a_clear_error_and_the_secret_is_not_in_it(
    s3: FsspecStore, tmp_path: Path, endpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Refusing(FsspecStore):
        def list_files(self, folder: str) -> list[str]:
            with self._translate_errors(folder):
                raise PermissionError("Access Denied for key a-secret-for-tests-42")

    options = {"endpoint_url": endpoint, "secret": "a-secret-for-tests-42"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOTILLA_REMOTE_OPTIONS", json.dumps(options))
        opened = open_store(s3.url, {})
    refusing = Refusing(opened._files, opened._root, s3.url)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RestoreError, match="no permission: Access Denied") as caught:
        restore(refusing, tmp_path / "new", name="test")
    assert "a-secret" not in str(caught.value)


def test_keys_in_a_spec_are_refused_with_where_they_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_file(tmp_path, remote_options={"secret": "hunter2hunter2"})
    assert command.main(["memory://x", "--config", str(spec)]) == 2
    error = capsys.readouterr().err
    assert "environment variable FLOTILLA_REMOTE_OPTIONS" in error
    assert "hunter2" not in error
    for url in ("s3://user:hunter2@bucket/x", "bucket/prefix", ""):
        spec = spec_file(tmp_path, remote=url)
        assert command.main(["memory://x", "--config", str(spec)]) == 2
        error = capsys.readouterr().err
        assert "expected a URL such as s3://bucket/prefix" in error
        assert "hunter2" not in error
