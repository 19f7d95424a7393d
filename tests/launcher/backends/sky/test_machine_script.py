"""Machines behind port mappings: the address that each service is given, by a real shell."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.backends.sky.machine_script import OWN_CODE, WatchedReplica, run_script
from flotilla_launcher.backends.sky.single_machine import whole_run_task
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.state import ReplicaKey
from tests.support.repository import ROOT

LEARNER, GATEWAY, ROLLOUT = ("learner", 0), ("env_gateway", 0), ("rollout", 0)
MAPPED = {"VAST_TCP_PORT_50051": "10022", "VAST_TCP_PORT_50052": "10023"}


def arguments(
    tmp_path: Path,
    key: ReplicaKey,
    environment: Mapping[str, str],
    *,
    public: bool = True,
    metrics: bool = False,
) -> list[str]:
    """A service's arguments, as the shell of its machine passes them."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    watched = WatchedReplica(
        run_id="run",
        key=key,
        module=f"flotilla_{key[0]}",
        python=str(python),
        registry="launcher.example.com:7",
        port=50051,
        public=public,
        hard_limit_s=60,
        metrics=metrics,
    )
    done = subprocess.run(
        ["bash", "-c", run_script(watched)],
        env={"PATH": os.environ["PATH"], "RUNPOD_PUBLIC_IP": "203.0.113.7", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("environment", "learner", "weights"),
    [
        ({}, "203.0.113.7:50051", "203.0.113.7:50052"),
        (MAPPED, "203.0.113.7:10022", "203.0.113.7:10023"),
    ],
    ids=["opened", "mapped"],
)
def test_a_learner_serves_weights_by_grpc_at_a_port_of_its_own(
    tmp_path: Path, environment: dict[str, str], learner: str, weights: str
) -> None:
    given = arguments(tmp_path, LEARNER, environment)
    assert "--listen=0.0.0.0:50051" in given
    assert f"--advertise={learner}" in given
    assert "--learner.weights.network=public" in given
    assert "--learner.weights.port=50052" in given
    assert f"--learner.weights.advertise={weights}" in given


def test_a_rented_service_serves_prometheus_when_the_spec_has_it(tmp_path: Path) -> None:
    for metrics in (True, False):
        given = arguments(tmp_path, ("rollout", 0), {}, public=False, metrics=metrics)
        assert ("--metrics-listen" in given) is metrics


def test_no_other_service_gets_addresses_of_weights(tmp_path: Path) -> None:
    for key in (GATEWAY, ROLLOUT):
        assert "weights" not in " ".join(arguments(tmp_path, key, {}))
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    private = arguments(tmp_path, LEARNER, nodes, public=False)
    assert "weights" not in " ".join(private)
    assert "--listen=10.0.0.4:0" in private


@pytest.mark.parametrize("whole", [False, True], ids=["unit", "one-machine"])
def test_a_project_with_a_services_package_of_its_own_runs_ours(
    tmp_path: Path, whole: bool
) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/__init__.py").write_text("raise SystemExit('theirs was imported')")
    if whole:
        python = f"--launcher.sky.python={sys.executable}"
        spec = load_spec(ROOT / "deploy/runs/openenv-fleet-grpo.toml", [python])
        script = whole_run_task("missing.toml", read_spec(spec))["run"]
    else:
        watched = WatchedReplica(
            "run", ROLLOUT, "flotilla_rollout", sys.executable, "h:7", 0, False, 60
        )
        script = run_script(watched)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "theirs" not in done.stderr
    assert ("missing.toml" if whole else "spec.json") in done.stderr + done.stdout


def test_the_code_that_a_machine_was_given_goes_before_what_is_installed_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "gen/flotilla").mkdir(parents=True)
    given = tmp_path / "services/launcher/flotilla_launcher"
    given.mkdir(parents=True)
    (given / "__init__.py").write_text("raise SystemExit('given')")
    watched = WatchedReplica(
        "run", ROLLOUT, "flotilla_rollout", sys.executable, "h:7", 0, False, 60
    )
    done = subprocess.run(
        ["bash", "-c", run_script(watched)], cwd=tmp_path, capture_output=True, text=True
    )
    assert "given" in done.stderr


def test_modules_that_somebody_added_to_the_code_of_a_machine_are_found(tmp_path: Path) -> None:
    (tmp_path / "gen/flotilla").mkdir(parents=True)
    (tmp_path / "added").mkdir()
    (tmp_path / "added/module.py").write_text("raise SystemExit('added')")
    script = f"{OWN_CODE}\n{sys.executable} -P -m added.module"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "added" in done.stderr.splitlines()
