"""The launcher's own environment checks what it can when the services' is elsewhere only.

It reports the rest, and refuses no run for it.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from flotilla_common.process.extras import install_command
from flotilla_common.spec.config import canonical_json
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.start_gate import doctor_gate
from flotilla_launcher.ports import PendingRun
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import Run
from tests.support.doctor import check, forged_services, probed, spec, subject
from tests.support.repository import ROOT

ELSEWHERE = ("launcher.backend=sky", "launcher.sky.python=nowhere/bin/python")
REPORTED = ("there is no nowhere/bin/python here", "`make setup` makes .venv")


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Hide a package from this interpreter, which is the launcher's."""
    monkeypatch.setitem(sys.modules, module, None)


async def test_packages_that_cannot_be_checked_here_are_a_warning(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    about = subject(spec(policy, tasks, *ELSEWHERE), tmp_path)
    check(await probed("versions", about), Status.WARN, *REPORTED, "is another one")


@pytest.mark.slow
async def test_a_tokenizer_is_compared_by_the_launchers_own_packages_or_warned_of(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = subject(spec(policy, tasks, *ELSEWHERE), tmp_path)
    check(await probed("tokenizer", about), Status.OK, "transformers loads the same tokenizer")
    hide(monkeypatch, "transformers")
    check(await probed("tokenizer", about), Status.WARN, *REPORTED, "lacks transformers", "digest")


async def test_a_store_is_tried_by_the_launchers_own_packages(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remote(folder: Path) -> str:
        return f"learner.checkpoint.remote=file://{folder}"

    about = subject(spec(policy, tasks, *ELSEWHERE, remote(tmp_path / "kept")), tmp_path)
    check(await probed("store", about), Status.OK, "wrote, read back and removed")
    (tmp_path / "file").touch()
    wrong = subject(spec(policy, tasks, *ELSEWHERE, remote(tmp_path / "file/kept")), tmp_path)
    check(await probed("store", wrong), Status.FAIL, "cannot write to")
    hide(monkeypatch, "fsspec")
    check(await probed("store", wrong), Status.WARN, *REPORTED, "lacks fsspec")


async def test_a_store_that_only_the_launchers_own_packages_do_not_know_refuses_no_run(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "gen")])
    environ = {"PYTHONPATH": path, "AWS_ACCESS_KEY_ID": "an-id-for-tests"}
    bucket = "learner.checkpoint.remote=s3://bucket/prefix"
    elsewhere = subject(spec(policy, tasks, *ELSEWHERE, bucket), tmp_path, **environ)
    check(await probed("store", elsewhere), Status.WARN, "is not tried", "s3fs", "`make setup`")
    here = subject(spec(policy, tasks, bucket), tmp_path, **environ)
    check(await probed("store", here), Status.FAIL, "s3fs", install_command("s3"))


@pytest.mark.usefixtures("uncounted")
async def test_canaries_are_opened_by_the_launchers_own_gateway_unless_it_has_to_start_more(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    alone = subject(spec(policy, tasks, *ELSEWHERE), tmp_path)
    check(await probed("episodes", alone), Status.OK, "booking: 4 tools", "tracker: 3 tools")
    emulated = json.dumps(["python", "-m", "flotilla_environments.fleet_emulator", "--port", "0"])
    starts = f"env_gateway.backends.fleet.command={emulated}"
    more = spec(policy, tasks, *ELSEWHERE, "env_gateway.backend=fleet", starts)
    reported = await probed("episodes", subject(more, tmp_path))
    check(reported, Status.WARN, *REPORTED, "env_gateway.backends.fleet starts processes")


async def test_a_start_lists_what_was_left_out_and_continues(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "torch")
    content = spec(policy, tasks, *ELSEWHERE, f"learner.checkpoint.remote=file://{tmp_path}/kept")
    of_others = ["clouds", "tokenizer", "dialect", "memory", "disk", "episodes"]
    content["launcher"]["skip_probes"] = of_others
    plan = parse_spec(canonical_json(content))
    run = Run(run_id="well-1", name="well", wanted=plan.config.replica_counts())
    intent = PendingRun(run, tmp_path / "runs/well-1", plan)
    with forged_services():
        reported = await doctor_gate(intent)
    found = [line.removeprefix("the doctor warns: ").partition(": ") for line in reported]
    warned = {probe: detail for probe, _, detail in found}
    assert warned.keys() == {"versions"}
    assert all(word in detail for detail in warned.values() for word in REPORTED)
