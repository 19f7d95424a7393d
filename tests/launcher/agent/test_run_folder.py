"""A learner's folder on a new machine: brought from the store, or refused, never begun twice."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher import learner_programs
from flotilla_launcher.agent.run_folder import (
    NotResumableError,
    RunFolder,
    StoreAwayError,
)
from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from tests.support.launcher import spec
from tests.support.remote_checkpoints import RUN_ID
from tests.support.remote_checkpoints import UploadingMachine as Uploading
from tests.support.watched_machine import machine


def folder(tmp_path: Path, url: str | None) -> RunFolder:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec()))
    (tmp_path / "runs").mkdir()
    return RunFolder(tmp_path / "runs" / "fake-1", url, path, tmp_path / "unit.log")


async def test_a_machine_that_has_the_journal_resumes_it(tmp_path: Path) -> None:
    found = folder(tmp_path, "file:///nowhere")
    found.run_dir.mkdir()
    (found.run_dir / "journal.sqlite").touch()
    assert await found.ensure_ready(True) is False


async def test_a_machine_without_the_learners_programs_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_programs, "find_spec", lambda name: None)
    with pytest.raises(NotResumableError, match=r"has trained.*'flotilla-rl\[learner\]'"):
        await folder(tmp_path, "file:///nowhere").ensure_ready(True)


async def test_a_run_that_has_not_trained_is_begun(tmp_path: Path) -> None:
    assert await folder(tmp_path, None).ensure_ready(False) is False


async def test_a_run_that_has_trained_is_never_begun_where_nothing_was_uploaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(NotResumableError, match=r"learner\.checkpoint\.remote names no store"):
        await folder(tmp_path, None).ensure_ready(True)


async def test_a_run_without_its_journal_is_never_begun(tmp_path: Path) -> None:
    found = folder(tmp_path, None)
    found.run_dir.mkdir()
    (found.run_dir / "journal.lock").touch()
    with pytest.raises(NotResumableError, match=r"its journal .* is gone"):
        await found.ensure_ready(False)


async def test_an_empty_store_lets_a_new_run_begin_and_no_other(tmp_path: Path) -> None:
    found = folder(tmp_path, f"file://{tmp_path}/store/fake-1")
    assert await found.ensure_ready(False) is False
    with pytest.raises(NotResumableError, match="no run has a checkpoint there"):
        await found.ensure_ready(True)


async def test_a_store_out_of_reach_is_named(tmp_path: Path) -> None:
    class UnreachableStore(RunFolder):
        async def _run_restore(self) -> int:
            return 3

    found = folder(tmp_path, "s3://bucket/fake-1")
    away = UnreachableStore(found.run_dir, found.url, found.spec, found.log)
    with pytest.raises(StoreAwayError, match="s3://bucket/fake-1 is out of reach"):
        await away.ensure_ready(True)


@pytest.mark.slow
async def test_a_store_out_of_reach_is_tried_again_by_the_launchers_count_and_then_given_up(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path, backoff_s=0.1) as here:
        wish = json.loads((here.folder / "spec.json").read_text())
        # Not a key of the stand-in for a learner, whose launcher does not see this file.
        wish["learner"]["checkpoint"] = {"remote": "s3://bucket/prefix"}
        (here.folder / "spec.json").write_text(json.dumps(wish))
        away = json.dumps({"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}})
        here.secrets |= {
            "AWS_ACCESS_KEY_ID": "an-id",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "FLOTILLA_REMOTE_OPTIONS": away,
        }
        process = await here.watch("serve", service="learner", options=("--resume",))
        assert await asyncio.wait_for(process.wait(), 100) == 3
        assert here.log("learner").count("error: cannot reach s3://bucket/prefix/") == 3
        last = here.last("learner")
        assert last is not None and last.restarts == 2


async def test_a_learner_whose_run_is_lost_does_not_start(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        process = await here.watch("serve", service="learner", options=("--resume",))
        assert await asyncio.wait_for(process.wait(), 40) == 2
        assert "begins" not in here.log("learner")
        assert "has trained, but this machine has nothing of it" in here.log("learner")


async def test_a_learner_that_has_reported_steps_is_not_begun_elsewhere(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        body: dict[str, Any] = {"phase": "training", "step": 3, "total_steps": 9, "metrics": {}}
        here.served.launcher.store.add_event(here.run_id, 0.0, "progress", body)
        process = await here.watch("serve", service="learner")
        assert await asyncio.wait_for(process.wait(), 40) == 2
        assert "has trained, but this machine has nothing of it" in here.log("learner")
        last = here.last("learner")
        assert last is not None and last.exit is not None and last.exit.code == 2


async def test_a_new_machine_gets_the_run_from_the_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store/{RUN_ID}", {"auto_mkdir": True})
    await Uploading(tmp_path / "old", store).upload(20)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**spec(), "name": "test"}))
    found = RunFolder(tmp_path / "new" / RUN_ID, store.url, path, tmp_path / "unit.log")
    assert await found.ensure_ready(True) is True
    assert (found.run_dir / "journal.sqlite").exists()
    assert await found.ensure_ready(True) is False
