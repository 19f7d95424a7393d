"""A service process from its command line to its exit code."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.launcher.v1 import registry_service_pb2 as pb
from flotilla.launcher.v1 import registry_service_pb2_grpc as pb_grpc
from flotilla_common.process.service_main import run_service_process
from flotilla_common.rpc import rpc
from flotilla_launcher.security import certificates
from tests.common.registry import FakeRegistry
from tests.common.sample_service import SampleConfig, run
from tests.support import echo_service
from tests.support.outsiders import RUN, beyond_loopback, member
from tests.support.outsiders import run as run_identity
from tests.support.repository import ROOT
from tests.support.waiting import until

SPEC = """
name = "sample"
seed = 4
[policy]
model = "runs/tiny-{seed}"
max_model_len = 128
[learner]
not_ours = 1
"""
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    processes: list[asyncio.subprocess.Process] = []
    (tmp_path / "spec.toml").write_text(SPEC)

    async def begin(*arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.common.sample_service"),
            *("--config", str(tmp_path / "spec.toml"), "--run-dir", str(tmp_path / "run")),
            *arguments,
            cwd=ROOT,
            env={**os.environ, "FLOTILLA_TOKEN": echo_service.TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def finished(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, (out + err).decode()


async def line(process: asyncio.subprocess.Process, event: str) -> dict[str, str]:
    assert process.stderr is not None
    while raw := await asyncio.wait_for(process.stderr.readline(), 20):
        entry = json.loads(raw)
        if entry["event"] == event:
            return entry
    raise AssertionError(f"no line {event!r}")


async def test_sigterm_drains_and_the_process_ends_well(start: Start) -> None:
    process = await start("--run-id", "r-1")
    ready = await line(process, "ready")
    assert ready["model"] == "runs/tiny-4"
    assert (ready["run_id"], ready["service"]) == ("r-1", "rollout")
    async with rpc.plain_channel(ready["address"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    # Twice at once, as when a terminal signals a group and the launcher forwards it.
    process.terminate()
    process.send_signal(signal.SIGINT)
    await line(process, "drained")
    assert await process.wait() == 0


async def test_a_drained_process_ends_though_a_library_clings_to_it(start: Start) -> None:
    process = await start("--rollout.mode=clings")
    await line(process, "ready")
    process.terminate()
    await line(process, "the service ended")
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_process_that_is_still_loading_cleans_up_and_ends_at_a_signal(
    start: Start,
) -> None:
    process = await start("--rollout.mode=loads")
    await line(process, "loading")
    process.send_signal(signal.SIGTERM)
    code, text = await finished(process)
    assert (code, "cleaned up" in text) == (0, True), text


async def test_a_process_that_imports_for_long_ends_within_seconds_of_a_signal(
    start: Start,
) -> None:
    process = await start("--rollout.mode=imports")
    await line(process, "loading")
    process.send_signal(signal.SIGTERM)
    code, _ = await finished(process)
    assert code == 0


async def test_a_second_signal_ends_a_process_that_does_not_drain(start: Start) -> None:
    process = await start("--rollout.mode=stubborn")
    await line(process, "ready")
    process.terminate()
    await line(process, "draining")
    await asyncio.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGINT


@pytest.mark.parametrize(("mode", "code"), [("fail", 1), ("away", 3)])
async def test_a_failure_shows_by_its_code_whether_to_try_again(
    start: Start, mode: str, code: int
) -> None:
    process = await start(f"--rollout.mode={mode}")
    returned, output = await finished(process)
    assert returned == code
    assert "the service failed" in output
    assert echo_service.TOKEN not in output


def answer(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[Any, str]:
    """Exit code and output of a command line that ends before the service starts."""
    (tmp_path / "spec.toml").write_text(SPEC)
    given = ["--config", str(tmp_path / "spec.toml"), "--run-dir", str(tmp_path), *arguments]
    # The setting lasts as long as the process, which is that of the tests.
    kept = mock.patch("flotilla_common.process.service_main.keep_private")
    with kept as called, pytest.raises(SystemExit) as exit_:
        run_service_process("rollout", SampleConfig, lambda: run, doc="A sample.", argv=given)
    called.assert_called_once_with()
    captured = capsys.readouterr()
    return exit_.value.code, captured.out + captured.err


def test_wrong_configuration_is_reported_at_once_and_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = ("--rollout.cont=1", "--policy.modl=2", "--rolout.x=1")
    code, output = answer(capsys, tmp_path, "--check-config", *wrong)
    assert code == 2
    assert "rolout: unknown key; did you mean 'rollout'?" in output
    assert "policy.modl: unknown key; did you mean 'model'?" in output
    assert "cont: unknown key; did you mean 'count'?" in output


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["--check-config"], "", "is valid"),
        (["--help"], "", "--rollout.count=1"),
        ([], "", "no token: set FLOTILLA_TOKEN"),
        (["--listen", "0.0.0.0:0"], echo_service.TOKEN, "refusing to listen"),
        (["--registry", "192.0.2.9:1"], echo_service.TOKEN, "pass --peer NAME=HOST:PORT"),
        (["--peer", "learner=192.0.2.9:1"], echo_service.TOKEN, "refusing to call 192.0.2.9:1"),
        (["--tls-dir", "/nowhere"], echo_service.TOKEN, "cannot read ca.pem"),
        (["--advertise", "a b"], echo_service.TOKEN, "write HOST or HOST:PORT"),
        (["--sead", "1"], echo_service.TOKEN, "overrides are written --rollout.key=value"),
        (["--run-id", "../x"], echo_service.TOKEN, "a letter or digit first"),
        (["--peer", "learner"], echo_service.TOKEN, "NAME=HOST:PORT"),
        (["--token-file", "/nowhere"], echo_service.TOKEN, "cannot read the token file"),
        (["--registry", "127.0.0.1:1"], echo_service.TOKEN, "pass --peer NAME=HOST:PORT"),
    ],
)
def test_the_command_line_answers_with_the_fix(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    token: str,
    message: str,
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", token)
    code, output = answer(capsys, tmp_path, *arguments)
    assert message in output
    assert code == (0 if arguments in (["--check-config"], ["--help"]) else 2)


async def test_a_process_serves_a_run_beyond_loopback(start: Start, tmp_path: Path) -> None:
    certificates.store_identity(tmp_path, run_identity())
    folder = str(certificates.identity_folder(tmp_path, RUN) / "rollout")
    process = await start(
        *("--run-id", RUN, "--tls-dir", folder),
        *("--listen", "0.0.0.0:0", "--advertise", beyond_loopback()),
    )
    ready = await line(process, "ready")
    assert ready["address"].startswith(f"{beyond_loopback()}:")
    async with member(ready["address"], "rollout") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    process.terminate()
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("service", "arguments", "error"),
    [
        ("learner", ["--run-id", RUN], f"is that of learner.{RUN}.flotilla, this process is"),
        ("rollout", ["--run-id", "other"], "this process is rollout.other.flotilla"),
        ("rollout", ["--run-id", RUN, "--listen", "0.0.0.0:0"], "pass --advertise HOST"),
    ],
)
def test_a_certificate_that_no_peer_would_accept_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    service: str,
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", echo_service.TOKEN)
    certificates.store_identity(tmp_path, run_identity())
    folder = certificates.identity_folder(tmp_path, RUN) / service
    code, output = answer(capsys, tmp_path, *arguments, "--tls-dir", str(folder))
    assert (code, error in output) == (2, True), output


async def test_a_process_registers_and_obeys_stop(start: Start) -> None:
    fake, server = FakeRegistry(), rpc.server(token=echo_service.TOKEN)
    pb_grpc.add_RegistryServiceServicer_to_server(fake, server)
    async with rpc.serving(server, "127.0.0.1:0", grace_s=0) as serving:
        process = await start(
            "--registry", serving.address, "--replica", "3", "--rollout.mode=stubborn"
        )
        ready = await line(process, "ready")
        await until(lambda: bool(fake.heartbeats))
        assert fake.registered[0].address == ready["address"]
        beat = fake.heartbeats[-1]
        assert (beat.replica, beat.phase, beat.serving, beat.step) == (3, "serving", True, 1)
        fake.command = pb.COMMAND_STOP
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_service_started_by_hand_is_of_the_run_whose_folder_it_gets(start: Start) -> None:
    for arguments, run_id in (((), "run"), (("--run-id", "another"), "another")):
        process = await start(*arguments)
        assert (await line(process, "ready"))["run_id"] == run_id
        process.send_signal(signal.SIGTERM)
        await finished(process)


async def test_a_folder_that_cannot_be_made_is_refused_in_a_sentence(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file")
    code, output = await finished(await start())
    assert (code, "Traceback" in output) == (2, False), output
    assert f"--run-dir {tmp_path / 'run'}: File exists" in output
