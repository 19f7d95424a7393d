"""Runs that are resumed on another machine: from their folder or from their upload."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_launcher.store.run_files import recover_stored_run
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.row_codec import count_fates
from flotilla_learner.journal.store import open_journal
from tests.support.launcher import serving, spec, start_cli


def write_run(run_dir: Path, **sections: Any) -> Path:
    """The folder of a run that a learner has begun."""
    run_dir.mkdir(parents=True)
    (run_dir / "spec.json").write_text(json.dumps(spec(**sections)))
    for name in ("journal.lock", "journal.sqlite"):
        (run_dir / name).touch()
    (run_dir / "steps").write_text("2")
    return run_dir


async def run_cli(*arguments: str) -> tuple[int, str]:
    process = await start_cli(*arguments, forged=True)
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_run_that_was_copied_from_another_machine_is_resumed_by_its_id(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "fake-elsewhere", learner={"steps": 4})
    async with serving(tmp_path) as served:
        request = pb.StartRunRequest(request_id="1", resume_run_id="fake-elsewhere")
        assert (await served.runs.StartRun(request)).run_id == "fake-elsewhere"
        run = await served.ended("fake-elsewhere")
    assert run.state == pb.RUN_STATE_COMPLETED, run.error
    assert (tmp_path / "fake-elsewhere" / "steps").read_text() == "4"


async def test_a_run_that_was_recorded_with_old_names_goes_on_with_todays(tmp_path: Path) -> None:
    made, python = tmp_path / "made.json", ("python", "-P", "-m")
    words = ("environments.tasks", "--split", "train", "--count", "1", "--out", str(made))
    folder = write_run(
        tmp_path / "fake-old",
        learner={"steps": 4},
        prepare=[{"creates": str(made), "command": [*python, *words]}],
    )
    async with serving(tmp_path) as served:
        request = pb.StartRunRequest(request_id="1", resume_run_id="fake-old")
        await served.runs.StartRun(request)
        run = await served.ended("fake-old")
    assert run.state == pb.RUN_STATE_COMPLETED, run.error
    assert json.loads(made.read_text())["tasks"], "made by a command of that time"
    own = json.loads((folder / "spec.json").read_text())
    assert own == json.loads(run.spec_json)
    assert own["prepare"][0]["command"][:2] == ["flotilla", "tasks"]


async def refusal(served: Any, run_id: str, spec_json: str = "") -> str:
    request = pb.StartRunRequest(request_id=run_id, resume_run_id=run_id, spec_json=spec_json)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.runs.StartRun(request)
    known = rpc.service_error(caught.value)
    assert known is not None
    return f"{known.reason}: {known.message}"


async def test_a_run_whose_folder_or_journal_is_gone_is_not_restarted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec())
        await served.ended(run_id)
        run_dir = tmp_path / run_id
        (run_dir / "journal.lock").touch()
        answer = await refusal(served, run_id)
        assert answer.startswith("NOT_RESUMABLE")
        assert "journal.sqlite is gone" in answer
        shutil.move(run_dir, tmp_path / "moved")
        assert f"its folder {run_dir} is gone" in await refusal(served, run_id)
        run_dir.symlink_to(tmp_path / "moved")
        assert "is a symbolic link" in await refusal(served, run_id)


@pytest.mark.parametrize("run_id", ["../../etc", "/etc", "-x", "a/b", "a\0b", "A", "x" * 300])
def test_an_id_that_could_leave_the_folder_names_no_run(tmp_path: Path, run_id: str) -> None:
    write_run(tmp_path / "etc")
    assert recover_stored_run(tmp_path / "runs", run_id) is None


def test_a_link_and_a_folder_without_a_spec_are_no_runs(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "real")
    (tmp_path / "linked").symlink_to(run_dir)
    assert recover_stored_run(tmp_path, "real") is not None
    assert recover_stored_run(tmp_path, "linked") is None
    for text in ("{}", "[]", "no json", '{"name": "../x", "policy": {}}'):
        (run_dir / "spec.json").write_text(text)
        assert recover_stored_run(tmp_path, "real") is None


def uploaded(folder: Path, **sections: Any) -> str:
    """The URL of a run whose only checkpoint is a fake."""
    import asyncio

    from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
    from tests.support.remote_checkpoints import RUN_ID, UploadingMachine

    store = open_store(f"file://{folder}/elsewhere/{RUN_ID}", {})
    machine = UploadingMachine(folder / "old", store, spec=json.dumps(spec(**sections)))
    asyncio.run(machine.upload(2))
    machine.note(acknowledged=7, step=5)
    return store.url


@pytest.fixture
def url(tmp_path: Path) -> str:
    return uploaded(tmp_path, learner={"steps": 3})


async def test_train_resumes_from_a_url_under_the_same_run_id(tmp_path: Path, url: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec(learner={"steps": 3})))
    runs = tmp_path / "runs"
    arguments = ("train", str(path), "--resume", url, "--runs", str(runs))
    code, output = await run_cli(*arguments)
    assert code == 0, output
    assert "Restored run run at step 2" in output
    assert "lost with its disk: at least 7 newer attempts and 3 newer steps" in output
    assert "run completed" in output
    assert (runs / "run" / "journal.sqlite").exists()
    code, output = await run_cli(*arguments)
    assert (code, "already exists" in output) == (1, True)


async def test_a_url_that_cannot_be_resumed_from_starts_nothing(tmp_path: Path, url: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec()))
    runs = tmp_path / "runs"
    train = ("train", str(path), "--runs", str(runs), "--resume")
    code, output = await run_cli(*train, f"file://{tmp_path}/nothing")
    assert code == 1
    assert "error: file://" in output
    assert "no run has a checkpoint there" in output
    (manifest,) = (tmp_path / "elsewhere").rglob("manifests/*.json")
    manifest.write_text("{")
    code, output = await run_cli(*train, url)
    assert code == 1
    assert "has no intact checkpoint" in output
    path.write_text(json.dumps({**spec(), "name": "other"}))
    code, output = await run_cli(*train, "run")
    assert code == 2
    assert "there is no run run" in output
    assert not (runs / "launcher.sqlite").exists(), "no launcher has begun anything"


async def test_a_run_of_another_spec_is_not_resumed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "fake-1")
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**spec(), "name": "other"}))
    code, output = await run_cli("train", str(path), "--runs", str(runs), "--resume", "fake-1")
    assert code == 2
    assert "run fake-1 is of spec 'fake', not of 'other'" in output


async def test_a_journal_that_lost_its_newest_commits_is_resumed_on_the_users_request(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "runs" / "fake-1", learner={"steps": 3})
    (run_dir / "journal.sqlite").unlink()
    await open_journal(run_dir).close()
    mark = ProgressMark(run_dir / "journal.mark")
    found = mark.read_position()
    assert found is not None
    mark.reset_to(replace(found, commits=9, acknowledged=4))
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec(learner={"steps": 3})))
    train = ("train", str(path), "--runs", str(tmp_path / "runs"), "--accept-loss")
    code, output = await run_cli(*train)
    assert (code, "it requires --resume" in output) == (2, True)
    code, output = await run_cli(*train, "--resume", "fake-1")
    assert code == 0, output
    assert "Run fake-1 resumes from step 0; lost with its disk: at least 4 newer attempts" in output
    with open_read_only(run_dir / "journal.sqlite") as db:
        assert count_fates(db) == {"lost_with_disk": 4, "acknowledged": 4}
