"""The doctor before a start: prepared files are made first, and a failure refuses the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.spec.config import canonical_json
from flotilla_launcher.doctor import run_probes, start_gate
from flotilla_launcher.doctor.findings import Finding, Status, combine_findings, fail, ok, warn
from flotilla_launcher.doctor.probe_list import Probe
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.doctor.start_gate import doctor_gate
from flotilla_launcher.ports import LauncherHooks, PendingRun, RunRefusedError
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import Run
from tests.support.doctor import forged_services, spec
from tests.support.launcher import serving


async def test_the_doctor_looks_at_what_was_just_made(policy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    program = f"open({str(tasks)!r}, 'w').write('[]')"
    table = {"creates": str(tasks), "command": ["python", "-c", program]}
    hooks = LauncherHooks(gate=doctor_gate)
    with forged_services():
        async with serving(tmp_path, hooks=hooks) as served:
            run = await served.ended(
                await served.start({**spec(policy, tasks), "prepare": [table]})
            )
    assert json.loads(tasks.read_text()) == []
    assert run.state == pb.RUN_STATE_FAILED
    assert f"dataset: {tasks}: expected a JSON array" in run.error


async def test_a_refusal_lists_what_fails_alone(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mixed(subject: RunContext) -> list[Finding]:
        return [ok("booking is well"), warn("shop is slow", "wait"), fail("tracker is down", "go")]

    async def nothing(subject: RunContext) -> tuple[dict[str, Any], list[Finding]]:
        return {}, [ok("valid")]

    monkeypatch.setattr(start_gate, "PROBES", [Probe("episodes", mixed, 5.0)])
    monkeypatch.setattr(run_probes, "read_sections", nothing)
    plan = parse_spec(canonical_json(spec(policy, tmp_path / "tasks.json")))
    run = Run(run_id="well-1", name="well", wanted=plan.config.replica_counts())
    intent = PendingRun(run, tmp_path / "runs/well-1", plan)
    with pytest.raises(RunRefusedError) as refused:
        await doctor_gate(intent)
    lines = str(refused.value).splitlines()
    assert lines[:2] == ["the doctor found what would fail:", "episodes: tracker is down; go"]
    assert len(lines) == 3


def test_healthy_parts_come_last_and_are_marked() -> None:
    findings = [ok("booking is well"), fail("tracker is down", "go"), warn("shop is slow", "wait")]
    result = combine_findings("episodes", findings)
    assert result.status is Status.FAIL
    message = ["tracker is down; go", "warn: shop is slow; wait", "ok: booking is well"]
    assert result.detail.splitlines() == message
