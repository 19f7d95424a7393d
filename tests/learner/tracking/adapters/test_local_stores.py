"""The real Trackio and MLflow: what their own readers find in the stores that a run has written."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_address

BACKENDS = ("trackio", "mlflow")


def log(
    backend: str,
    folder: Path,
    first: int,
    last: int,
    *,
    resumed: bool = False,
    end: str = "read",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a process that logs these steps; return what it found afterwards, if it lived."""
    ours = ("TRACKIO_", "MLFLOW_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    module = "tests.learner.tracking.adapters.store_process"
    how = "resumed" if resumed else "new"
    done = subprocess.run(
        [sys.executable, "-m", module, backend, str(folder), str(first), str(last), how, end],
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if end == "kill":
        assert done.returncode < 0, done.stderr
        return {}
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Contents of each backend after a run was killed at step 3, before the journal recorded it
    as logged, and resumed to step 6. At step 5 the store failed."""
    stores: dict[str, dict[str, Any]] = {}
    for backend in BACKENDS:
        folder = tmp_path_factory.mktemp(backend)
        log(backend, folder, 1, 3, end="kill")
        stores[backend] = log(backend, folder, 3, 4, resumed=True, end="break")
    return stores


def test_trackio_has_every_point_of_a_killed_run_once(found: dict[str, dict[str, Any]]) -> None:
    points = found["trackio"]["points"]
    losses = [(p["step"], p["policy/loss"]) for p in points if "policy/loss" in p]
    assert losses == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (6, 3.0)]
    assert [p["step"] for p in points if "eval/all/pass_at_1" in p] == [2]
    spread = {"_type": "trackio.histogram", "bins": [0, 1, 2], "values": [3, 1]}
    assert points[0]["reward/spread"] == spread


def test_trackio_has_the_name_the_group_and_the_spec_without_secrets(
    found: dict[str, dict[str, Any]],
) -> None:
    run = found["trackio"]
    assert (run["id"], run["name"], run["config"]["_Group"]) == ("0123abcd", "my-run", "tests")
    assert run["config"]["learner"] == {"steps": 4, "chat": {"webhook": "***"}}


def test_mlflow_has_every_point_of_a_killed_run_once(found: dict[str, dict[str, Any]]) -> None:
    assert found["mlflow"]["history"] == {
        "policy/loss": [[1, 0.5], [2, 1.0], [3, 1.5], [4, 2.0], [6, 3.0]],
        # What MLflow takes in no name is `_` there.
        "odd/a_b": [[1, 1.0], [2, 1.0], [3, 1.0], [4, 1.0], [6, 1.0]],
        "eval/all/pass_at_1": [[2, 0.5]],
    }


def test_mlflow_has_the_name_the_tags_and_the_spec_without_secrets(
    found: dict[str, dict[str, Any]],
) -> None:
    run = found["mlflow"]
    assert (run["name"], run["status"]) == ("my-run", "FINISHED")
    assert run["params"] == {
        "learner.steps": "4",
        "learner.chat.webhook": "***",
        "tasks.a_b_c": "[1, 2]",
    }
    assert {"a", "group"} <= run["tags"].keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_local_store_opens_no_connection(found: dict[str, dict[str, Any]], backend: str) -> None:
    assert found[backend]["connected"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_fails_loses_the_points_of_that_time_and_counts_them(
    found: dict[str, dict[str, Any]], backend: str
) -> None:
    run = found[backend]
    assert run["lost"] == 1
    if backend == "trackio":
        steps = [point["step"] for point in run["points"] if "policy/loss" in point]
    else:
        steps = [step for step, _ in run["history"]["policy/loss"]]
    assert steps == [1, 2, 3, 4, 6]


def test_a_server_of_mlflow_that_is_down_costs_points_and_not_the_start(tmp_path: Path) -> None:
    server = free_address()
    down = {"MLFLOW_TRACKING_URI": f"http://{server}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    run = log("mlflow", tmp_path, 1, 2, end="lose", environment=down)
    assert run["lost"] == 2
    assert run["connected"]
    assert all("127.0.0.1" in address for address in run["connected"])


def test_trackio_writes_where_its_own_variable_says(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    log("trackio", tmp_path / "run", 1, 1, environment={"TRACKIO_DIR": str(shared)})
    assert list(shared.glob("*.db"))
    assert not (tmp_path / "run").exists()
