"""`flotilla env status` for runs of a launcher; its output is tested with a real gateway."""

import asyncio
from pathlib import Path

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_launcher.cli import env_status
from tests.launcher.cli.test_app import nothing_left, read_until, run_cli, write_spec
from tests.support.launcher import spec, start_cli


async def test_it_finds_the_gateway_of_the_newest_run_while_it_runs(tmp_path: Path) -> None:
    modules = {
        name: of for name, of in spec()["launcher"]["modules"].items() if name != "env_gateway"
    }
    learner = {"steps": 10_000, "step_s": 0.1}
    path = write_spec(tmp_path, launcher={"modules": modules}, learner=learner)
    runs = ("--runs", str(tmp_path / "runs"))
    code, output = await run_cli("env", "status", *runs)
    assert (code, "there are no runs" in output) == (1, True)
    process = await start_cli("train", str(path), *runs, forged=True)
    assert process.stdout is not None
    await asyncio.wait_for(read_until(process.stdout, "run running"), 30.0)
    code, output = await run_cli("env", "status", *runs)
    assert code == 0, output
    assert "env_gateway-0  serving" in output
    assert "no episode has been opened yet" in output
    code, output = await run_cli("env", "status", "no-such-run", *runs)
    assert (code, "there is no run 'no-such-run'" in output) == (1, True)
    process.terminate()
    await asyncio.wait_for(process.communicate(), 30.0)
    await nothing_left(tmp_path / "runs")
    code, output = await run_cli("env", "status", *runs)
    assert (code, "no env_gateway of run fake-" in output) == (1, True)


async def test_a_token_that_cannot_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "short")
    code, output = await run_cli("env", "status", "--address", "127.0.0.1:9")
    assert (code, "error: the token must be 16-512 characters" in output) == (1, True)


def test_no_cell_is_cut_short_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = pb.EnvironmentStatus(
        env_key="fleet_booking",
        backend="fleet_openenv",
        calls=3,
        call_errors=1,
        no_grades=2,
        grades=3,
        suspects=1,
    )
    environment.episodes["provisioning"] = 2
    environment.no_grade_reasons["execution_failed"] = 2

    async def status(gateway: env_status.GatewayTarget) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(phase="serving", environments=[environment])

    monkeypatch.setattr(env_status, "_get_status", status)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FLOTILLA_TOKEN", "t" * 16)
    assert env_status.env_status("newest", tmp_path, "127.0.0.1:9", as_json=False) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "fleet_booking" in line]
    for cell in (
        "fleet_openenv",
        "provisioning 2",
        "1 (33.3%)",
        "2 (execution_failed 2)",
        "3 (1 suspect)",
    ):
        assert cell in row
