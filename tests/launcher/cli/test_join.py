"""`flotilla join` as a process, with a stand-in for what it starts."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.cli.join import find_joinable_run
from flotilla_launcher.security.certificates import (
    LAUNCHER_ID,
    mint_identity,
    remove_identity,
    store_identity,
)
from tests.support.launcher import left_running, start_cli
from tests.support.waiting import until

RUN = "test-20260101-000000"
ADDRESS = "10.0.0.5"
# A busy machine takes ten times as long as an idle one.
_LIMIT_S = 60.0


def begin(runs: Path, run_id: str = RUN, *, nodes: int = 3) -> str:
    """Write what a launcher writes of a run before it starts anything; return the token."""
    spec: dict[str, Any] = {
        "name": "test",
        "policy": {"model": "none", "max_model_len": 64},
        "learner": {"rank": {"nodes": nodes}},
        "launcher": {
            "modules": {"learner": "tests.launcher.cli.joined"},
            "local": {"network": "private"},
            "backoff_s": 0.05,
            "max_restarts": 1,
        },
    }
    (runs / run_id).mkdir(parents=True, exist_ok=True)
    (runs / run_id / "spec.json").write_text(json.dumps(spec))
    identity = mint_identity(run_id)
    store_identity(runs, identity)
    return identity.token


def log(runs: Path, machine: int = 2) -> str:
    path = runs / RUN / "logs" / f"learner-node-{machine}.log"
    return path.read_text() if path.exists() else ""


@asynccontextmanager
async def joined(runs: Path, machine: int = 2) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await start_cli("join", ADDRESS, "--machine", str(machine), "--runs", str(runs))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    assert process.stdout is not None
    async with asyncio.timeout(_LIMIT_S):
        output = (await process.stdout.read()).decode()
        return await process.wait(), output


async def test_a_machine_joins_with_the_files_of_the_run_and_ends_when_dismissed(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    async with joined(runs) as process:
        token = begin(runs)
        await until(lambda: "--peer" in log(runs), _LIMIT_S)
        (runs / RUN / "end").write_text("0")
        code, _ = await ended(process)
    assert code == 0
    given = json.loads(log(runs).splitlines()[0])
    assert given["token"] == token
    assert given["certificates"] == ["ca.pem", "cert.pem", "key.pem"]
    assert given["--run-id"] == RUN
    assert given["--replica"] == "2"
    assert given["--peer"] == "learner=10.0.0.5:0"
    assert given["--tls-dir"].endswith(f"{RUN}/learner")
    # A folder of this machine alone.
    assert given["--run-dir"] == str(runs / f"{RUN}.nodes" / "learner-2")
    assert token not in json.dumps({k: v for k, v in given.items() if k.startswith("--")})


async def test_a_machine_that_fails_is_started_again_but_not_for_ever(tmp_path: Path) -> None:
    begin(tmp_path)
    async with joined(tmp_path) as process:
        for times in (1, 2):
            await until(lambda times=times: log(tmp_path).count("--peer") == times, _LIMIT_S)
            (tmp_path / RUN / "end").write_text("3")
        code, output = await ended(process)
    assert code == 1
    assert "exited with code 3; restarting it" in output
    assert "ending with 3" in output


async def test_a_machine_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    begin(tmp_path)
    async with joined(tmp_path) as process:
        await until(lambda: "--peer" in log(tmp_path), _LIMIT_S)
        (tmp_path / RUN / "end").write_text("2")
        code, output = await ended(process)
    assert (code, log(tmp_path).count("--peer")) == (2, 1)
    assert f"{RUN}/learner-node-2 exited with code 2" in output


async def test_a_run_that_has_ended_otherwise_is_waited_for_again(tmp_path: Path) -> None:
    begin(tmp_path)
    async with joined(tmp_path) as process:
        await until(lambda: "--peer" in log(tmp_path), _LIMIT_S)
        remove_identity(tmp_path, RUN)
        await until(lambda: "draining" in log(tmp_path), _LIMIT_S)
        token = begin(tmp_path)
        await until(lambda: log(tmp_path).count("--peer") == 2, _LIMIT_S)
        assert token in log(tmp_path)
        process.send_signal(signal.SIGTERM)
        code, _ = await ended(process)
    assert (code, log(tmp_path).count("draining")) == (0, 2)
    assert left_running(tmp_path) == []


async def test_a_machine_that_waits_for_a_run_may_be_stopped(tmp_path: Path) -> None:
    async with joined(tmp_path) as process:
        assert process.stdout is not None
        assert b"waiting for a run" in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert (await ended(process))[0] == 0


def test_the_run_to_join_began_last_and_has_further_machines(tmp_path: Path) -> None:
    store_identity(tmp_path, mint_identity(LAUNCHER_ID, ("launcher", "client")))
    assert find_joinable_run(tmp_path, "learner") is None
    begin(tmp_path, "older-1")
    begin(tmp_path, "newer-1")
    begin(tmp_path, "newest-1", nodes=1)
    found = find_joinable_run(tmp_path, "learner")
    assert found is not None and found.run_id == "newer-1"
    assert find_joinable_run(tmp_path, "rollout") is None


@pytest.mark.parametrize("arguments", [("--machine", "0"), (), ("--service", "env_gateway")])
async def test_what_no_further_machine_can_be_is_refused(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    process = await start_cli("join", ADDRESS, *arguments, "--runs", str(tmp_path))
    assert (await ended(process))[0] == 2
