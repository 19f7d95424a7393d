"""Whole runs whose checkpoints are uploaded: ends, zombies, and machines that are gone."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.checkpoints import background_uploads
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore
from flotilla_learner.checkpoints.background_uploads import UploadError
from flotilla_learner.checkpoints.remote_layout import Marker
from flotilla_learner.checkpoints.remote_restore import restore
from flotilla_learner.checkpoints.remote_upload import FencedError
from flotilla_learner.ports import RemoteStoreError, RemoteStoreRefusedError
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, RunningLearner, learner, make_config
from tests.support.remote_checkpoints import RUN_ID, manifests, query, train, unreliable
from tests.support.waiting import until

EVERY = {"every": 2, "keep": 2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RETRY_S", 0.1), ("BEAT_S", 0.05), ("_HURRIED_S", 0.1)):
        monkeypatch.setattr(background_uploads, name, seconds)


@asynccontextmanager
async def training(
    folder: Path, store: Any, ranks: FakeRanks | None = None, **changes: Any
) -> AsyncGenerator[RunningLearner]:
    """A learner that is at work, and ends with whatever is done to it."""
    values: dict[str, Any] = {"max_staleness": 0, "steps": 6, "checkpoint": EVERY, **changes}
    os.makedirs(folder, exist_ok=True)
    ranks = ranks or FakeRanks(folder / "weights")
    config = make_config(folder, **values)
    async with (
        learner(folder, config, ranks, store) as running,
        FakeWorker(running.address, delay_s=0.01).working(),
    ):
        yield running


async def until_there(store: FsspecStore, name: str) -> None:
    await until(lambda: name in manifests(store), state=lambda: manifests(store))


def adopt(folder: Path, store: FsspecStore) -> None:
    """Restore the run to another machine, where the tests look for it."""
    restore(store, folder / "runs", name="test")
    (folder / "runs" / RUN_ID).rename(folder / "run")


def parameters(folder: Path, step: int) -> bytes:
    return (folder / "run" / "checkpoints" / f"step-{step:06d}" / "model.bin").read_bytes()


@pytest.mark.slow
async def test_a_new_machine_resumes_from_s3_to_the_bits_of_the_run_that_was_never_stopped(
    s3: FsspecStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_uploads, "BEAT_S", 10.0)
    old, new, whole = tmp_path / "old", tmp_path / "new", tmp_path / "whole"
    await train(whole, None, checkpoint=EVERY)
    async with training(old, s3):
        await until_there(s3, "e000001-s000004")
    # At one blow: threads of the learner that was stopped may still be in its folder.
    old.rename(tmp_path / "gone")
    adopt(new, s3)
    summary = await train(new, s3, checkpoint=EVERY)
    assert parameters(new, 6) == parameters(whole, 6)
    assert summary["steps"] == 6
    assert manifests(s3)[-1] == "e000002-s000006"
    assert query(new / "run", "SELECT run_epoch FROM epochs") == [(1,), (2,)]
    accounts = summary["trajectories"]
    assert accounts["acknowledged"] == sum(n for k, n in accounts.items() if k != "acknowledged")
    assert accounts["trained"] == 6 * 3 * 2


async def test_losses_with_the_disk_are_reported_loudly_and_in_the_summary(
    store: FsspecStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with training(tmp_path / "old", store, steps=100, checkpoint={"every": 4}):
        await until_there(store, "e000001-s000004")
        for _ in range(2000):
            progress = json.loads(store.read("progress/e000001.json") or b'{"step": 0}')
            if progress["step"] >= 6:
                break
            await asyncio.sleep(0.005)
    adopt(tmp_path / "new", store)
    capfd.readouterr()
    summary = await train(tmp_path / "new", store, checkpoint=EVERY)
    lost = summary["trajectories"]["lost_with_disk"]
    # Two steps at the least, but for what of them was sampled when the checkpoint was made.
    assert lost >= 3 * 2
    accounts = summary["trajectories"]
    assert accounts["acknowledged"] == sum(n for k, n in accounts.items() if k != "acknowledged")
    out, err = capfd.readouterr()
    assert f"lost with the disk: at least {lost} acknowledged tries" in out + err
    await train(tmp_path / "new", store, checkpoint=EVERY, steps=7)
    out, err = capfd.readouterr()
    assert "lost with the disk" not in out + err, "printed once"


async def test_an_upload_that_a_kill_cut_off_is_made_by_the_next_start(
    store: FsspecStore, tmp_path: Path
) -> None:
    hang = threading.Event()

    def fault(call: str, what: str) -> None:
        if call == "upload" and "s000006" in what:
            hang.set()
            raise RemoteStoreError("cut off")

    async with training(tmp_path, unreliable(store, fault)):
        await asyncio.to_thread(hang.wait, 20)
    assert "e000001-s000006" not in manifests(store)
    assert (tmp_path / "run" / "uploads" / "e000001-s000006").exists()
    await train(tmp_path, store, checkpoint=EVERY)
    assert manifests(store)[-1] == "e000002-s000006"
    assert list((tmp_path / "run" / "uploads").iterdir()) == []


async def test_the_end_waits_for_the_last_upload_and_training_for_none(
    store: FsspecStore, tmp_path: Path
) -> None:
    waiting = tmp_path / "run" / "uploads"

    def fault(call: str, what: str) -> None:
        """The first upload takes until all steps are trained."""
        deadline = time.monotonic() + 20
        while call == "upload" and "s000002" in what and time.monotonic() < deadline:
            if not (waiting / "e000001-s000004").exists() and list(waiting.glob("*-s000006")):
                return
            time.sleep(0.005)

    await train(tmp_path, unreliable(store, fault), checkpoint=EVERY)
    # While the first was under way, the second was superseded by the third.
    assert manifests(store) == ["e000001-s000002", "e000001-s000006"]


async def test_a_last_upload_that_fails_ends_the_learner_with_an_error(
    store: FsspecStore, tmp_path: Path
) -> None:
    def refuse(call: str, what: str) -> None:
        if call == "upload" and "s000006" in what:
            raise RemoteStoreRefusedError("no permission")

    with pytest.raises(UploadError, match=r"the last checkpoint is not at memory.*no permission"):
        await train(tmp_path, unreliable(store, refuse), checkpoint=EVERY)
    assert manifests(store)[-1] < "e000001-s000006"

    def slow(call: str, what: str) -> None:
        if call == "upload":
            raise RemoteStoreError("slow down")

    with pytest.raises(UploadError, match=r"slow down|it takes more than 1 s"):
        await train(tmp_path, unreliable(store, slow), checkpoint={**EVERY, "remote_exit_s": 1})
    await train(tmp_path, store, checkpoint=EVERY)
    assert manifests(store)[-1] == "e000003-s000006"


async def test_a_learner_whose_run_went_on_elsewhere_ends(
    store: FsspecStore, tmp_path: Path
) -> None:
    with pytest.raises(FencedError, match="continued elsewhere"):
        async with training(tmp_path, store, steps=1000) as running:
            await until_there(store, "e000001-s000002")
            marker = Marker(2, "elsewhere", 2)
            store.write(marker.name, marker.encode())
            await asyncio.wait([running.task], timeout=20)


async def test_an_old_disk_that_comes_back_is_refused_and_its_run_continues(
    store: FsspecStore, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    await train(old, store, checkpoint=EVERY, steps=2)
    adopt(new, store)
    await train(new, store, checkpoint=EVERY, steps=4)
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"has epoch 2 of run run, which .* not know"):
            await train(old, store, checkpoint=EVERY)
    await train(new, store, checkpoint=EVERY)
    assert manifests(store)[-1] == "e000003-s000006"


async def test_a_run_whose_folder_is_gone_does_not_start_over_beside_its_checkpoints(
    store: FsspecStore, tmp_path: Path
) -> None:
    await train(tmp_path, store, checkpoint=EVERY, steps=2)
    # At one blow, as above.
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="flotilla train SPEC --resume memory://"):
        await train(tmp_path, store, checkpoint=EVERY)


async def test_a_store_that_cannot_be_read_ends_the_start(
    store: FsspecStore, tmp_path: Path
) -> None:
    def refuse(call: str, what: str) -> None:
        raise RemoteStoreRefusedError("no permission")

    with pytest.raises(ConfigError, match=r"learner\.checkpoint\.remote: no permission"):
        await train(tmp_path, unreliable(store, refuse), checkpoint=EVERY)

    def away(call: str, what: str) -> None:
        raise RemoteStoreError("connection refused")

    with pytest.raises(RemoteStoreError, match="connection refused"):
        await train(tmp_path, unreliable(store, away), checkpoint=EVERY)


async def test_uploads_are_measured(store: FsspecStore, tmp_path: Path) -> None:
    await train(tmp_path, store, checkpoint={"every": 1})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    uploads = [line for line in lines if "timing/upload" in line]
    assert uploads
    assert all(line["checkpoint/uploaded_bytes"] > 0 for line in uploads)
