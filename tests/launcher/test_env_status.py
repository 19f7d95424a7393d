"""`flotilla env status` for runs of a launcher; what it prints is tested with a real gateway."""

import asyncio
from pathlib import Path

import pytest

from tests.launcher.harness import spec, start_cli
from tests.launcher.test_cli import nothing_left, read_until, run_cli, write_spec


async def test_it_finds_the_gateway_of_the_newest_run_while_it_runs(tmp_path: Path) -> None:
    modules = {
        name: of for name, of in spec()["launcher"]["modules"].items() if name != "env_gateway"
    }
    learner = {"steps": 10_000, "step_s": 0.1}
    path = write_spec(tmp_path, launcher={"modules": modules}, learner=learner)
    runs = ("--runs", str(tmp_path / "runs"))
    code, output = await run_cli("env", "status", *runs)
    assert (code, "there are no runs" in output) == (1, True)
    process = await start_cli("train", str(path), *runs)
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
