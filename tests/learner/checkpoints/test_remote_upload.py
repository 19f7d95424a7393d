"""Contents of the store after an upload, whatever became of earlier uploads."""

import dataclasses
import itertools
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore, open_store
from flotilla_learner.checkpoints.remote_layout import (
    JOURNAL,
    LayoutError,
    Marker,
    Stamp,
    decode_manifest,
    surviving,
)
from flotilla_learner.checkpoints.remote_staging import snapshot
from flotilla_learner.checkpoints.remote_upload import (
    FencedError,
    LocalDamageError,
    Uploader,
    retry_request,
)
from flotilla_learner.ports import RemoteStoreError, RemoteStoreRefusedError
from tests.support.remote_checkpoints import (
    RUN_ID,
    Unreliable,
    UploadingMachine,
    manifests,
    no_wait,
    unreliable,
)


async def test_the_manifest_comes_last_and_names_what_is_there(
    s3: FsspecStore, tmp_path: Path
) -> None:
    order: list[str] = []
    flaky = unreliable(s3, lambda call, what: order.append(f"{call} {what}"))
    await UploadingMachine(tmp_path, flaky).upload(20)
    written = [line for line in order if line.split()[0] in ("write", "upload")]
    assert written[-1].startswith("write manifests/e000001-s000020.json")
    stamp = Stamp(1, 20)
    manifest = decode_manifest(s3.read(stamp.manifest) or b"", stamp)
    assert manifest.run_id == RUN_ID
    assert sorted(manifest.files) == [
        "journal.sqlite",
        "ranks/model.bin",
        "ranks/sub/more.bin",
        "spec.json",
    ]
    for name, file in manifest.files.items():
        assert s3.size(f"{stamp.folder}/{name}") == file.size_bytes
    assert s3.download(f"{stamp.folder}/spec.json", tmp_path / "back")
    assert not s3.download(f"{stamp.folder}/nothing", tmp_path / "nothing")


async def test_files_are_sent_several_at_once(store: FsspecStore, tmp_path: Path) -> None:
    machine = UploadingMachine(tmp_path, store)
    # Each file waits for another one.
    meeting = threading.Barrier(2)

    def meet(call: str, _: str) -> None:
        if call == "upload":
            meeting.wait(20)

    uploader = Uploader(unreliable(store, meet), machine.who, tmp_path, keep=2, wait=no_wait)
    assert uploader.upload(machine.stage(await machine.make(10))) > 0
    assert manifests(store) == ["e000001-s000010"]


async def test_files_of_an_interrupted_upload_are_no_checkpoint_and_go_with_the_next(
    s3: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path, s3)
    await machine.upload(10)

    def die(call: str, what: str) -> None:
        if call == "upload" and "ranks/sub" in what:
            raise KeyboardInterrupt

    flaky = unreliable(s3, die)
    cut_off = Uploader(flaky, machine.who, tmp_path, keep=2, wait=no_wait)
    staged = machine.stage(await machine.make(20))
    with pytest.raises(KeyboardInterrupt):
        cut_off.upload(staged)
    assert any("s000020" in name for name in s3.list_files("checkpoints"))
    assert manifests(s3) == ["e000001-s000010"]
    later = UploadingMachine(tmp_path, s3, run_epoch=2)
    later.uploader.upload(later.stage(await later.make(30)))
    assert manifests(s3) == ["e000001-s000010", "e000002-s000030"]
    assert not [name for name in s3.list_files("checkpoints") if "s000020" in name]


async def test_parts_of_a_file_that_was_never_completed_are_dropped(
    s3: FsspecStore, tmp_path: Path
) -> None:
    files: Any = s3._files  # pyright: ignore[reportPrivateUsage]
    bucket, prefix, _ = files.split_path(s3._root)  # pyright: ignore[reportPrivateUsage]
    for key in (f"{prefix}/checkpoints/e000001-s000010/ranks/model.bin", "another/owner"):
        files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    await UploadingMachine(tmp_path, s3).upload(20)
    left = [part["Key"] for part in files.list_multipart_uploads(bucket)]
    assert [key for key in left if key.startswith(prefix)] == []
    assert "another/owner" in left


async def test_as_many_are_kept_as_should_be_and_a_manifest_goes_before_its_files(
    store: FsspecStore, tmp_path: Path
) -> None:
    removed: list[str] = []

    def note(call: str, what: str) -> None:
        if call == "remove":
            removed.append(what)

    flaky = unreliable(store, note)
    machine = UploadingMachine(tmp_path, flaky)
    for step in (10, 20, 30):
        await machine.upload(step)
    assert manifests(store) == ["e000001-s000020", "e000001-s000030"]
    kept = {name.split("/")[1] for name in store.list_files("checkpoints")}
    assert kept == {"e000001-s000020", "e000001-s000030"}
    first, second = [line for line in removed if "s000010" in line]
    assert "manifests/" in first
    assert "checkpoints/" in second


async def test_a_failed_request_is_repeated_and_one_that_is_refused_is_not(
    store: FsspecStore, tmp_path: Path
) -> None:
    failures = iter([RemoteStoreError("reset"), RemoteStoreError("slow down")])

    def fail(call: str, what: str) -> None:
        if call == "upload" and "model.bin" in what and (error := next(failures, None)):
            raise error

    flaky = unreliable(store, fail)
    await UploadingMachine(tmp_path, flaky).upload(10)
    assert manifests(store) == ["e000001-s000010"]
    requests = 0

    def refuse() -> None:
        nonlocal requests
        requests += 1
        raise RemoteStoreRefusedError("no permission")

    with pytest.raises(RemoteStoreRefusedError):
        retry_request(refuse, no_wait)
    assert requests == 1


def test_pauses_between_requests_grow_and_end_with_the_learner() -> None:
    pauses: list[float] = []

    def fail() -> None:
        raise RemoteStoreError("away")

    with pytest.raises(RemoteStoreError):
        retry_request(fail, lambda seconds: bool(pauses.append(seconds)))
    assert len(pauses) == 5
    assert all(later > earlier * 0.99 for earlier, later in itertools.pairwise(pauses))
    pauses.clear()
    with pytest.raises(RemoteStoreError):
        retry_request(fail, lambda seconds: not pauses.append(seconds))
    assert len(pauses) == 1


async def test_what_arrives_changed_is_sent_again(store: FsspecStore, tmp_path: Path) -> None:
    sent = 0

    class Garbling(Unreliable):
        def upload(self, path: Path, name: str, count: Callable[[int], None]) -> None:
            nonlocal sent
            sent += name.endswith("model.bin")
            store.upload(path, name, count)
            if name.endswith("model.bin") and sent == 1:
                store.write(name, b"xx")

    garbling: Any = Garbling(store, lambda call, what: None)
    await UploadingMachine(tmp_path, garbling).upload(10)
    assert sent == 2
    assert store.read("checkpoints/e000001-s000010/ranks/model.bin") == b"10"


async def test_a_file_that_changed_on_the_disk_does_not_replace_a_whole_checkpoint(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path, store)
    await machine.upload(10)
    row = await machine.make(20)
    (Path(row.directory) / "model.bin").write_bytes(b"damaged")
    with pytest.raises(LocalDamageError, match=r"ranks/model\.bin of step 20 has changed"):
        machine.uploader.upload(machine.stage(row))
    (Path(row.directory) / "model.bin").unlink()
    with pytest.raises(LocalDamageError, match=r"ranks/model\.bin of step 20 is missing"):
        machine.uploader.upload(machine.stage(row))
    assert manifests(store) == ["e000001-s000010"]


async def test_a_checkpoint_that_is_removed_while_it_waits_is_uploaded_all_the_same(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path, store)
    row = await machine.make(10)
    staged = machine.stage(row)
    same = os.stat(Path(row.directory) / "model.bin").st_ino
    assert (staged.folder / "ranks/model.bin").stat().st_ino == same, "linked, not copied"
    shutil.rmtree(row.directory)
    machine.uploader.upload(staged)
    assert manifests(store) == ["e000001-s000010"]


async def test_what_is_there_already_is_not_uploaded_again_by_the_next_start(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path, store)
    row = await machine.make(10)
    assert machine.uploader.upload(machine.stage(row)) > 0
    restarted = UploadingMachine(tmp_path, store, run_epoch=2)
    assert restarted.uploader.upload(restarted.stage(row)) == 0
    assert manifests(store) == ["e000001-s000010"]


async def test_an_older_epoch_uploads_nothing_once_a_later_one_has_begun(
    store: FsspecStore, tmp_path: Path
) -> None:
    zombie = UploadingMachine(tmp_path / "old", store, run_epoch=3)
    await zombie.upload(10)
    store.write(Marker(4, "other", 10).name, Marker(4, "other", 10).encode())
    with pytest.raises(FencedError, match="is at epoch 4, this learner at 3"):
        await zombie.upload(20)
    assert manifests(store) == ["e000003-s000010"]
    assert not [name for name in store.list_files("checkpoints") if "s000020" in name]


async def test_an_epoch_that_begins_during_an_upload_keeps_its_manifest_away(
    store: FsspecStore, tmp_path: Path
) -> None:
    marker = Marker(4, "other", 10)

    def begin(call: str, what: str) -> None:
        if call == "upload" and "ranks/" in what:
            store.write(marker.name, marker.encode())

    flaky = unreliable(store, begin)
    zombie = UploadingMachine(tmp_path, flaky, run_epoch=3)
    with pytest.raises(FencedError):
        await zombie.upload(20)
    assert manifests(store) == []


def test_readers_ignore_what_an_epoch_made_after_a_later_one_began() -> None:
    markers = [Marker(3, "a", 0), Marker(4, "b", 20), Marker(5, "c", 27)]
    made = [Stamp(3, 10), Stamp(3, 20), Stamp(3, 30), Stamp(4, 25), Stamp(4, 30), Stamp(5, 30)]
    assert surviving(made, markers) == [Stamp(3, 10), Stamp(3, 20), Stamp(4, 25), Stamp(5, 30)]


async def test_the_newest_epoch_removes_what_a_zombie_slipped_in(
    store: FsspecStore, tmp_path: Path
) -> None:
    zombie = UploadingMachine(tmp_path / "old", store, run_epoch=3)
    for step in (10, 20):
        await zombie.upload(step)
    marker = Marker(4, "other", 10)
    store.write(marker.name, marker.encode())
    await UploadingMachine(tmp_path / "new", store, run_epoch=4).upload(15)
    assert manifests(store) == ["e000003-s000010", "e000004-s000015"]
    assert not [name for name in store.list_files("checkpoints") if "s000020" in name]


async def test_the_journal_that_goes_along_is_of_the_moment_it_was_held(
    store: FsspecStore, tmp_path: Path
) -> None:
    machine = UploadingMachine(tmp_path, store)
    await machine.make(10)
    journal = tmp_path / JOURNAL_FILE
    with closing(sqlite3.connect(journal)) as db, db:
        groups = [("g0", "planned", 9), ("g1", "planned", 11), ("g2", "open", None)]
        for group, state, step in groups:
            row = (group, 0, "train", "", "{}", 1, state, "", step)
            db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            _receive(db, group, 0)

    def receive_more() -> None:
        with closing(sqlite3.connect(journal)) as db, db:
            _receive(db, "g2", 1)

    copy = tmp_path / "copy.sqlite"
    assert snapshot(journal, copy, 10, receive_more) == 3
    assert [name for name in os.listdir(tmp_path) if "copy" in name] == ["copy.sqlite"]
    with closing(sqlite3.connect(copy)) as db:
        found = db.execute("SELECT group_id, payload FROM trajectories ORDER BY 1").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert found == [("g0", None), ("g1", b"arrays"), ("g2", b"arrays")]


def _receive(db: sqlite3.Connection, group: str, index: int) -> None:
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(trajectories)")]
    values = {"group_id": group, "attempt_index": index, "payload": b"arrays", "try": 0}
    db.execute(
        f"INSERT INTO trajectories VALUES ({','.join('?' * len(columns))})",
        [values.get(name, b"") for name in columns],
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "format 2, but this learner reads 1"),
        (
            {"files": {"../../etc/passwd": {"sha256": "", "size_bytes": 1}}},
            "is not the name of a file",
        ),
        ({"files": {"/etc/passwd": {"sha256": "", "size_bytes": 1}}}, "is not the name of a file"),
        ({"stamp": {"run_epoch": 9, "step": 9}}, "is the manifest of e000009-s000009"),
        ({"files": []}, "not a manifest"),
        ({"run_id": None, "acknowledged": "many"}, "not a manifest"),
    ],
)
async def test_a_manifest_that_is_not_one_is_refused(
    store: FsspecStore, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    stamp = (await UploadingMachine(tmp_path, store).upload(10)).stamp
    fields = {**json.loads(store.read(stamp.manifest) or b""), **change}
    with pytest.raises(LayoutError, match=why):
        decode_manifest(json.dumps(fields).encode(), stamp)
    with pytest.raises(LayoutError, match="not a manifest"):
        decode_manifest((store.read(stamp.manifest) or b"")[:-9], stamp)


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_any_file_system_of_fsspec_will_do(scheme: str, tmp_path: Path) -> None:
    root = f"{tmp_path}/elsewhere" if scheme == "file" else f"/{tmp_path.name}"
    store = open_store(f"{scheme}://{root}", {})
    machine = UploadingMachine(tmp_path / "run", store)
    for step in (10, 20, 30):
        staged = await machine.upload(step)
    assert manifests(store) == ["e000001-s000020", "e000001-s000030"]
    target = tmp_path / "back"
    assert store.download(f"{staged.stamp.folder}/{JOURNAL}", target)
    assert target.read_bytes() == (staged.folder / JOURNAL).read_bytes()
    assert store.list_files("nothing") == []
    assert not store.download("nothing", tmp_path / "nothing")
    assert dataclasses.asdict(staged.stamp) == {"run_epoch": 1, "step": 30}
