"""A real watcher over a real process, with a launcher that serves, leaves and returns."""

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flotilla_launcher.agent.agent import DEFAULT_LEFT_S
from flotilla_launcher.agent.decisions import EXIT_SILENCE
from flotilla_launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase
from flotilla_launcher.state import Outcome
from tests.support.launcher import TOKEN
from tests.support.watched_machine import WatchedMachine, machine, metadata_server

AWS = "/latest/meta-data/spot/instance-action"
_SECRET_FILES = ["ca.pem", "cert.pem", "key.pem", "token"]
GCP = "/computeMetadata/v1/instance/preempted"
# From SIGTERM to SIGKILL, by default.
SLURM_KILL_WAIT_S = 30.0


async def test_a_crash_loop_ends_with_the_last_exit_code(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        process = await here.watch("crash")
        assert await asyncio.wait_for(process.wait(), 40) == 3
        last = here.last()
        assert last is not None and last.phase is UnitPhase.EXITED and last.restarts == 2
        assert last.exit is not None and last.exit.code == 3
        assert "out of luck" in last.exit.tail
        assert here.log().count("crash begins") == 3
        assert not list(here.temporary.iterdir())


async def test_a_silent_launcher_ends_everything_of_the_unit(tmp_path: Path) -> None:
    async with machine(tmp_path, lease_s=1.5, drain_s=0.5) as here:
        process = await here.watch("deaf")
        await here.begins()
        assert len(here.left()) >= 2
        await here.registry.down()
        assert await asyncio.wait_for(process.wait(), 40) == EXIT_SILENCE
        assert not here.left()


async def test_a_launcher_that_comes_back_within_the_lease_changes_nothing(tmp_path: Path) -> None:
    async with machine(tmp_path, lease_s=4.0) as here:
        process = await here.watch("serve")
        pid = await here.begins()
        for _ in range(2):
            await here.registry.down()
            await asyncio.sleep(0.8)
            await here.registry.up()
            await asyncio.sleep(0.7)
        assert process.returncode is None
        assert [found.pid for found in here.left()] == [pid]
        assert here.log().count("begins") == 1


async def test_a_command_to_drain_ends_it_with_the_code_of_the_service(tmp_path: Path) -> None:
    async with machine(tmp_path, lease_s=2.0) as here:
        process = await here.watch("serve")
        await here.begins()
        here.supervisor.request_stop(10.0)
        assert await asyncio.wait_for(process.wait(), 40) == 0
        assert here.log().endswith("drained\n")


async def test_sigterm_drains_while_schedulers_wait_and_is_reported_as_preemption(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path, drain_s=60.0) as here:
        process = await here.watch("litter")
        await here.begins()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 40) == EXIT_PREEMPTED
        assert here.log().endswith("drained\n")
        assert not here.left()
        notes = here.served.launcher.store.list_events(here.run_id, 0)
        assert any("is losing its machine" in str(event.body) for event in notes)
        # The rest of these seconds is for the final report.
        assert _graces(here) == [DEFAULT_LEFT_S - 2.0]
        assert DEFAULT_LEFT_S < SLURM_KILL_WAIT_S


def _graces(here: WatchedMachine) -> list[float]:
    """The grace periods that the watcher gave its service for draining."""
    lines = [json.loads(line) for line in here.output.splitlines() if line.startswith("{")]
    return [line["grace_s"] for line in lines if line["event"] == "draining"]


@pytest.mark.slow
async def test_what_ignores_sigterm_is_ended_and_reported_before_a_scheduler_kills(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path, drain_s=60.0) as here:
        process = await here.watch("deaf")
        await here.begins()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), SLURM_KILL_WAIT_S) == EXIT_PREEMPTED
        assert not here.left()
        last = here.last()
        assert last is not None and last.exit is not None
        assert last.exit.code == EXIT_PREEMPTED


@pytest.mark.slow
async def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    async with machine(tmp_path, drain_s=60.0) as here:
        process = await here.watch("deaf")
        await here.begins()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.7)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 40) == EXIT_PREEMPTED
        assert not here.left()


@pytest.mark.parametrize("cloud", ["aws", pytest.param("gcp", marks=pytest.mark.slow)])
async def test_a_notice_of_the_cloud_drains_in_time(tmp_path: Path, cloud: str) -> None:
    answers: dict[str, str] = {"/latest/api/token": "token"} if cloud == "aws" else {GCP: "FALSE"}
    with metadata_server(answers) as url:
        async with machine(tmp_path, sky=_spot(), drain_s=60.0) as here:
            process = await here.watch("serve", options=("--metadata-url", url))
            await here.begins()
            assert here.last() is not None
            at = datetime.now(UTC) + timedelta(seconds=90)
            if cloud == "aws":
                answers[AWS] = json.dumps({"action": "terminate", "time": f"{at:%FT%TZ}"})
            else:
                answers[GCP] = "TRUE"
            assert await asyncio.wait_for(process.wait(), 40) == EXIT_PREEMPTED
            assert here.log().endswith("drained\n")
            notes = here.served.launcher.store.list_events(here.run_id, 0)
            assert any("is losing its machine" in str(event.body) for event in notes)


@pytest.mark.slow
async def test_what_does_not_drain_is_killed_before_the_machine_goes(tmp_path: Path) -> None:
    answers: dict[str, str] = {}
    with metadata_server(answers) as url:
        async with machine(tmp_path, sky=_spot(), drain_s=60.0) as here:
            process = await here.watch("deaf", options=("--metadata-url", url))
            await here.begins()
            at = datetime.now(UTC) + timedelta(seconds=6)
            answers[AWS] = json.dumps({"action": "stop", "time": f"{at:%FT%TZ}"})
            began = time.monotonic()
            assert await asyncio.wait_for(process.wait(), 40) == EXIT_PREEMPTED
            assert time.monotonic() - began < 15
            assert not here.left()


@pytest.mark.slow
async def test_a_notice_file_drains(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        notice = tmp_path / "notice"
        process = await here.watch("serve", options=("--notice-file", str(notice)))
        await here.begins()
        notice.touch()
        assert await asyncio.wait_for(process.wait(), 40) == EXIT_PREEMPTED
        assert here.log().endswith("drained\n")


def _spot() -> dict[str, object]:
    return {"rollout": {"any_of": [{"infra": "aws", "use_spot": True}]}}


async def test_secrets_reach_the_service_in_files_that_do_not_stay(tmp_path: Path) -> None:
    reported = tmp_path / "reported.json"
    async with machine(tmp_path, tls=True) as here:
        process = await here.watch("report", str(reported))
        pid = await here.begins()
        await here.until(reported.exists)
        found = reported.read_text()
        seen = _seen_of(pid, process.pid) + found.encode()
        _check_private(json.loads(found)["argv"])
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 40)
        key = here.secrets["FLOTILLA_TLS"]
        for secret in (TOKEN, key, "PRIVATE KEY"):
            assert secret.encode() not in seen
            assert secret not in here.log() + here.output
            assert not _files_with(here.folder, secret.encode())
        assert not list(here.temporary.iterdir())


def _seen_of(service: int, watcher: int) -> bytes:
    """The parts of these processes that other users can read."""
    names = (f"{service}/environ", f"{service}/cmdline", f"{watcher}/cmdline")
    return b"".join(Path("/proc", name).read_bytes() for name in names)


def _check_private(argv: list[str]) -> None:
    file = Path(argv[argv.index("--token-file") + 1])
    folder = Path(argv[argv.index("--tls-dir") + 1])
    assert (file.read_text(), file.parent) == (TOKEN, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == _SECRET_FILES
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def _files_with(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


async def test_a_killed_watcher_takes_everything_along_and_a_successor_resumes(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path) as here:
        first = await here.watch("litter", forged=False)
        await here.begins()
        assert len(here.left()) >= 2
        os.kill(first.pid, signal.SIGKILL)
        await first.wait()
        await here.until(lambda: not here.left() and not list(here.temporary.iterdir()))
        second = await here.watch("serve")
        await here.until(lambda: "serve begins" in here.log())
        assert "drained\nserve begins" in here.log()
        await _ends(here, second)


@pytest.mark.slow
async def test_a_watcher_with_a_successor_elsewhere_ends(tmp_path: Path) -> None:
    async with machine(tmp_path, lease_s=2.0) as here:
        first = await here.watch("serve")
        await here.begins()
        other = tmp_path / "elsewhere"
        other.mkdir()
        (other / "spec.json").write_text((here.folder / "spec.json").read_text())
        elsewhere = replace(here, folder=other, processes=[])
        second = await elsewhere.watch("serve")
        try:
            assert await asyncio.wait_for(first.wait(), 40) == 0
            assert not here.left()
            assert second.returncode is None
        finally:
            elsewhere.end()


async def test_a_further_machine_of_a_gateway_is_refused(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        process = await here.watch("serve", service="env_gateway", options=("--node", "1"))
        assert await asyncio.wait_for(process.wait(), 40) == 2
        assert "set num_nodes = 1 in [launcher.sky.env_gateway]" in here.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "label"), [("learner", "learner-node-1"), ("rollout", "rollout-0-node-1")]
)
async def test_a_further_machine_obeys_and_logs_but_does_not_speak_for_its_replica(
    tmp_path: Path, service: str, label: str
) -> None:
    async with machine(tmp_path) as here:
        further = await here.watch("serve", service=service, options=("--node", "1"))
        log = here.served.launcher.folder / here.run_id / "logs" / f"{label}.log"
        await here.until(lambda: log.exists() and "serve begins" in log.read_text())
        assert here.last(service) is None
        assert here.log(service) == ""
        # The first machine is responsible for the content of a run's folder.
        assert not here.run_dir.exists()
        here.supervisor.request_stop(30.0)
        assert await asyncio.wait_for(further.wait(), 40) == 0
        assert log.read_text().endswith("drained\n")
        assert not here.left()


async def test_a_further_machine_is_started_again_by_the_same_count_as_a_replica(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path) as here:
        further = await here.watch("crash", service="rollout", options=("--node", "1"))
        assert await asyncio.wait_for(further.wait(), 40) == 3
        log = here.served.launcher.folder / here.run_id / "logs" / "rollout-0-node-1.log"
        assert log.read_text().count("crash begins") == 3
        # It does not speak for its replica.
        assert here.supervisor.run.replicas["rollout", 0].failures == ()
        assert here.supervisor.run.outcome is Outcome.NONE


async def test_while_the_launcher_is_silent_nothing_restarts(tmp_path: Path) -> None:
    async with machine(tmp_path, lease_s=6.0) as here:
        process = await here.watch("serve")
        pid = await here.begins()
        await here.registry.down()
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(3.0)
        assert not here.left() and process.returncode is None
        await here.registry.up()
        await here.until(lambda: here.log().count("serve begins") == 2)
        replica = here.supervisor.run.replicas["rollout", 0]
        assert (len(replica.failures), replica.restarts) == (1, 1)
        await _ends(here, process)


async def _ends(here: WatchedMachine, process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.wait(), 40)
    assert not here.left()
