"""The command as a whole: its output, its exit code, its omissions, and its end."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import apply_override
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.doctor.findings import Finding, Status, ok
from flotilla_launcher.doctor.probe_list import PROBES, Probe
from flotilla_launcher.doctor.probe_process import run_command
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.doctor.run_probes import examine_run, run_probes
from flotilla_launcher.doctor.start_gate import doctor_gate
from flotilla_launcher.ports import PendingRun, RunRefusedError
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import Run
from tests.support.doctor import forged_services, spec, subject
from tests.support.launcher import run_cli_here
from tests.support.repository import ROOT

NAMES = ["spec", *(probe.name for probe in PROBES)]


def doctor(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flotilla_launcher.cli.app", "doctor", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


async def doctor_here(*arguments: str | Path) -> tuple[int, str]:
    """Run the command in this process: its exit code and its output."""
    with forged_services():
        return await run_cli_here("doctor", *map(str, arguments))


@pytest.mark.slow
async def test_the_demo_as_it_is_shipped_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, output = await doctor_here("deploy/runs/local.toml", "--json")
    results = json.loads(output)
    assert code == 0, output
    assert [result["probe"] for result in results] == NAMES
    assert all(set(result) == {"probe", "status", "detail"} for result in results)
    by_name = {result["probe"]: result["status"] for result in results}
    assert by_name["spec"] == by_name["versions"] == "ok"
    assert "fail" not in by_name.values()


@pytest.mark.slow
def test_a_run_in_which_nothing_is_wrong_passes_every_probe_that_applies(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(canonical_json(spec(policy, tasks)))
    done = doctor(path, "--json")
    by_name = {result["probe"]: result["status"] for result in json.loads(done.stdout)}
    applied = {name for name, status in by_name.items() if status == "ok"}
    assert done.returncode == 0, done.stdout
    assert applied >= {"spec", "versions", "ports", "memory", "disk", "tokenizer", "dataset"}
    assert "episodes" in applied


async def test_a_fault_ends_with_code_1_and_is_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(canonical_json(spec(tmp_path / "nowhere", tmp_path / "nothing.json")))
    code, output = await doctor_here(path, "--skip", "episodes")
    assert code == 1
    assert "PROBE" in output and "STATUS" in output
    assert "This run would fail: model, memory, disk, tokenizer, dataset." in output


async def test_a_spec_that_is_wrong_is_named_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(canonical_json(spec(tmp_path, tmp_path / "t.json", "learner.steps=-1")))
    skip = [word for name in NAMES[1:] for word in ("--skip", name)]
    code, output = await doctor_here(path, "--json", *skip)
    first = json.loads(output)[0]
    assert (code, first["probe"], first["status"]) == (1, "spec", "fail")
    assert "steps" in first["detail"] and "correct the spec" in first["detail"]


def test_an_unknown_probe_is_refused() -> None:
    done = doctor("deploy/runs/local.toml", "--skip", "disks")
    assert done.returncode == 1
    assert "--skip disks: no such probe; did you mean 'disk'?" in done.stdout


async def test_a_probe_that_hangs_is_ended_and_delays_no_other(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"
    program = (
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    )

    async def hang(about: RunContext) -> list[Finding]:
        await run_command((sys.executable, "-c", program, str(marker)), b"", about.environ)
        return []

    async def quick(_: RunContext) -> list[Finding]:
        return [ok("well")]

    async def broken(_: RunContext) -> list[Finding]:
        raise ZeroDivisionError

    probes = [
        Probe("hanging", hang, 1.5),
        Probe("quick", quick, 1.0),
        Probe("broken", broken, 1.0),
        Probe("left", broken, 1.0),
    ]
    content = spec(policy, tasks, 'launcher.skip_probes=["secrets"]')
    about = subject(content, tmp_path)
    with forged_services():
        _, hanging, well, wrong, left = await examine_run(about, ("left",), probes)
    assert (hanging.status, "no answer within 1.5 s" in hanging.detail) == (Status.FAIL, True)
    assert (well.status, wrong.status, left.status) == (Status.OK, Status.FAIL, Status.SKIPPED)
    assert "the probe itself failed: ZeroDivisionError()" in wrong.detail
    assert not psutil.pid_exists(int(marker.read_text()))


async def test_what_a_server_repeats_of_its_key_is_hidden_whatever_its_variable(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    async def repeat_keys(about: RunContext) -> list[Finding]:
        return [ok(" and ".join(about.environ[name] for name in ("OFFICE_ONE", "OFFICE_TWO")))]

    servers = """env_gateway.servers=[
        {name = "one", url = "http://127.0.0.1:9", api_key_env = "OFFICE_ONE"},
        {name = "two", url = "http://127.0.0.1:9", headers = {x-key = "$OFFICE_TWO"}}]"""
    content = spec(policy, tasks, "env_gateway.backend=mcp", servers)
    about = subject(content, tmp_path)
    keys = {"OFFICE_ONE": "alpha-0123456789", "OFFICE_TWO": "bravo-0123456789"}
    about = replace(about, environ={**about.environ, **keys})
    (found,) = await run_probes(about, [Probe("repeating", repeat_keys, 1.0)])
    assert found.detail == "[OFFICE_ONE] and [OFFICE_TWO]"


def intent(content: dict[str, Any], folder: Path) -> PendingRun:
    plan = parse_spec(canonical_json(content))
    run = Run(run_id="well-1", name="well", wanted=plan.config.replica_counts())
    return PendingRun(run, folder / "runs" / "well-1", plan)


async def test_a_run_that_is_well_may_start_here_and_one_that_is_not_is_refused(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    ill = spec(policy, tmp_path / "nothing.json")
    with forged_services():
        await doctor_gate(intent(spec(policy, tasks), tmp_path))
        with pytest.raises(
            RunRefusedError, match=r"dataset: learner\.tasks: .*there is no such task file"
        ) as refused:
            await doctor_gate(intent(ill, tmp_path))
        assert "launcher.skip_probes" in str(refused.value)
        apply_override(ill, 'launcher.skip_probes=["dataset"]')
        await doctor_gate(intent(ill, tmp_path))


def test_a_start_here_runs_no_probe_that_costs_something() -> None:
    costly = {probe.name for probe in PROBES if not probe.local}
    assert costly == {"tokenizer", "dialect"}
    assert LauncherConfig().skip_probes == ()
