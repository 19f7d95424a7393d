"""A launcher runs the missing parts of a run's `[[prepare]]` before anything costs money."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.text.redaction import add_secret
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.control import prepare_commands
from flotilla_launcher.state import RunState
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.cli.test_app import nothing_left, run_cli, write_spec
from tests.support.launcher import left_running, serving, spec, start_cli
from tests.support.launcher_process import start_launcher
from tests.support.waiting import until


def table(made: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"creates": str(made), "command": ["python", "-c", program], **more}


def making(made: Path, sleep_s: float = 0.0) -> str:
    """A program that leaves a letter each time it runs."""
    return (
        "import time; print('working', flush=True);"
        f" time.sleep({sleep_s}); open({str(made)!r}, 'a').write('x')"
    )


def notes(runs: Path, run_id: str) -> list[str]:
    store = Ledger(runs / "launcher.sqlite")
    found = [str(event.body.get("text", "")) for event in store.list_events(run_id, 0)]
    store.close()
    return found


async def test_what_is_missing_is_made_first_and_what_is_there_is_left_alone(
    tmp_path: Path,
) -> None:
    made, there = tmp_path / "made", tmp_path / "there"
    there.touch()
    tables = [table(there, "exit('never run')"), table(made, making(made))]
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(prepare=tables, learner={"steps": 1, "step_s": 0.01}))
        run = await served.ended(run_id)
        assert run.state == pb.RUN_STATE_COMPLETED, run.error
    assert made.read_text() == "x"
    assert [text for text in notes(tmp_path, run_id) if "prepar" in text] == [f"preparing: {made}"]
    assert "working\n" in (tmp_path / run_id / "logs/prepare.log").read_text()


async def test_a_submitted_spec_starts_on_a_launcher_that_has_nothing_yet(tmp_path: Path) -> None:
    made, runs = tmp_path / "made", tmp_path / "runs"
    wish = write_spec(tmp_path, prepare=[table(made, making(made))], learner={"steps": 1})
    code, output = await run_cli("submit", str(wish), "--request-id", "a", "--runs", str(runs))
    assert code == 0, output
    assert f"preparing: {made}" in output
    assert made.read_text() == "x"


async def test_a_failure_refuses_the_run_with_the_command_and_its_last_words(
    tmp_path: Path,
) -> None:
    add_secret("a-secret-of-the-launcher")
    program = "print('a-secret-of-the-launcher'); exit('no luck today')"
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(prepare=[table(tmp_path / "made", program)]))
        run = await served.ended(run_id)
        assert run.state == pb.RUN_STATE_FAILED
        assert not [replica for replica in run.replicas if replica.restarts]
    printed = (tmp_path / run_id / "logs/prepare.log").read_text()
    for text in (run.error, printed):
        assert "python -c" in text and "no luck today" in text
        assert "a-secret" not in text
    assert not (tmp_path / run_id / "logs/learner-0.log").exists()


async def test_a_launcher_without_torch_refuses_and_names_the_services_environment(
    tmp_path: Path,
) -> None:
    wish = spec(prepare=[table(tmp_path / "tiny 0", "import torch_that_is_not_here")])
    async with serving(tmp_path) as served:
        run = await served.ended(await served.start(wish))
    assert f"{sys.executable} has no torch_that_is_not_here" in run.error
    assert "beforehand" in run.error
    assert ".venv/bin/python -c 'import torch_that_is_not_here'" in run.error


async def test_a_program_that_imports_an_old_name_is_told_the_new_one(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text("from environments.tasks import make_tasks\n")
    wish = spec(prepare=[{"creates": "made", "command": ["python", str(program)]}])
    async with serving(tmp_path) as served:
        run = await served.ended(await served.start(wish))
    assert run.error.endswith("\nenvironments.tasks is flotilla_environments.tasks now")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/no/such/program"], "cannot run `/no/such/program`"),
        (["true"], "did not create"),
        (["sleep", "60"], "took longer than 0.3 s"),
        ([], "prepare.0.command: is empty"),
        (["flotilla", "taks"], "prepare.0.command: flotilla has no command 'taks'; did you mean"),
    ],
)
async def test_a_command_that_cannot_make_it_refuses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], why: str
) -> None:
    monkeypatch.setattr(prepare_commands, "LIMIT_S", 0.3)
    tables = [{"creates": str(tmp_path / "made"), "command": command}]
    async with serving(tmp_path) as served:
        run = await served.ended(await served.start(spec(prepare=tables)))
    assert run.state == pb.RUN_STATE_FAILED
    assert why in run.error
    assert not left_running(tmp_path)


async def until_preparing(run_dir: Path) -> None:
    path = run_dir / "logs/prepare.log"
    await until(lambda: path.exists() and "\nworking\n" in path.read_text())


async def test_a_stop_meanwhile_ends_the_command_at_once(tmp_path: Path) -> None:
    made = tmp_path / "made"
    program = (
        "import subprocess, sys, time; print('working', flush=True);"
        " subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(prepare=[table(made, program)]))
        await until_preparing(tmp_path / run_id)
        assert left_running(tmp_path)
        began = time.monotonic()
        state = await served.launcher.stop_run(run_id, 60.0)
        assert state is RunState.STOPPED
        assert time.monotonic() - began < 30.0
        assert left_running(tmp_path) == []


async def test_two_runs_that_want_the_same_make_it_once(tmp_path: Path) -> None:
    made = tmp_path / "made"
    wish = spec(prepare=[table(made, making(made, 0.5))], learner={"steps": 1, "step_s": 0.01})
    async with serving(tmp_path) as served:
        started = [await served.start(wish) for _ in range(2)]
        runs = [await served.ended(run_id) for run_id in started]
    assert [run.state for run in runs] == [pb.RUN_STATE_COMPLETED] * 2
    assert made.read_text() == "x"


async def test_a_command_has_the_keys_that_it_may_need_and_none_of_the_launchers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "fleet-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "store-key")
    monkeypatch.setenv("S3_DATASET_BUCKET", "tasks")
    monkeypatch.setenv("S3_OTHER", "for no command")
    for name in ("SLACK_BOT_TOKEN", "LAMBDA_API_KEY", "FLOTILLA_TOKEN", "MY_HOOK"):
        monkeypatch.setenv(name, "of the launcher alone")
    made = tmp_path / "made"
    program = f"import json, os; open({str(made)!r}, 'w').write(json.dumps(dict(os.environ)))"
    launcher = {"notify": {"webhook_env": "MY_HOOK"}, "sky": {"secrets": ["FLEET_API_KEY"]}}
    async with serving(tmp_path) as served:
        prepare = [{**table(made, program), "variables": ["AWS_*", "S3_DATASET_BUCKET"]}]
        run_id = await served.start(spec(prepare=prepare, launcher=launcher))
        await served.until(run_id, lambda _: made.exists() and bool(made.read_text()))
    found = json.loads(made.read_text())
    assert found["FLEET_API_KEY"] == "fleet-key"
    assert (found["AWS_SECRET_ACCESS_KEY"], found["S3_DATASET_BUCKET"]) == ("store-key", "tasks")
    assert found[MARK_VARIABLE].endswith(f":{run_id}/prepare")
    assert not {"of the launcher alone", "for no command"} & set(found.values())


async def test_the_next_launcher_waits_for_the_command_of_one_that_was_killed(
    tmp_path: Path,
) -> None:
    made, runs = tmp_path / "made", tmp_path / "runs"
    runs.mkdir()
    path = write_spec(tmp_path, prepare=[table(made, making(made, 4.0))], learner={"steps": 1})
    first = await start_launcher(runs)
    submit = await start_cli(
        "submit", str(path), "--request-id", "a", "--runs", str(runs), forged=True
    )
    await until(lambda: list(runs.glob("fake-*")))
    (run_dir,) = runs.glob("fake-*")
    await until_preparing(run_dir)
    first.kill()
    await first.wait()
    submit.kill()
    await submit.communicate()
    second = await start_launcher(runs)
    try:
        await asyncio.wait_for(_until_completed(runs, run_dir.name), 30.0)
    finally:
        second.send_signal(signal.SIGTERM)
        await second.wait()
    assert made.read_text() == "x"
    await nothing_left(runs)


async def _until_completed(runs: Path, run_id: str) -> None:
    while True:
        store = Ledger(runs / "launcher.sqlite")
        stored = store.get_run(run_id)
        store.close()
        if stored is not None and stored.run.state.has_ended:
            assert stored.run.state is RunState.COMPLETED, stored.run.error
            return
        await asyncio.sleep(0.1)
