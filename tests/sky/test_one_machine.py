"""A whole run on one machine, by plain `sky launch` of the file that `flotilla plan` writes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flotilla_learner.checkpoints.remote_layout import stamps
from tests.faults import harness
from tests.sky.box.layout import ROOT, SERVICES_PYTHON
from tests.sky.sdk import launch, logs
from tests.sky.session import SkySession
from tests.sky.whole_run import materials

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(900),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]
_NODE = {"infra": "slurm/mini/cpu", "cpus": "4", "memory": "4"}


@pytest.fixture
def made(sky_session: SkySession) -> Iterator[Path]:
    with materials(sky_session) as folder:
        yield folder


def write_spec(made: Path) -> Path:
    """Write it to a place that the node reads too, with one machine for all services."""
    wish = harness.spec(made / "policy", made / "tasks.json", steps=3)
    wish["name"] = "solo"
    del wish["learner"]["eval"]
    machines = {name: {"ordered": [_NODE]} for name in ("learner", "env_gateway", "rollout")}
    wish["launcher"] |= {
        "backend": "sky",
        "max_hours": 0.25,
        "sky": {"setup": "true", "python": str(SERVICES_PYTHON), **machines},
    }
    path = made / "spec.json"
    path.write_text(json.dumps(wish))
    return path


def test_a_plain_launch_trains_all_steps_on_the_chosen_tasks_and_keeps_the_model(
    sky_session: SkySession, made: Path, tmp_path: Path
) -> None:
    sky: Any = import_module("sky")
    plan = ("plan", str(write_spec(made)), "--learner.steps=2", "--one-machine")
    flotilla = (sys.executable, "-m", "flotilla_launcher.cli.app")
    command = (*flotilla, *plan, "--out", str(tmp_path))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    choices = [
        ("MAX_TASKS", "8"),
        ("CHECKPOINT_REMOTE", f"file://{made / 'uploads'}"),
        ("FLOTILLA_TEST_TASKS", str(made / "tasks.json")),
        ("OMP_NUM_THREADS", "1"),
    ]
    dags: Any = import_module("sky.utils.dag_utils")
    [task] = dags.load_dag_from_yaml(str(tmp_path / "solo.yaml"), choices).tasks
    job, _ = launch(task, "solo")
    try:
        shown = logs("solo", job)
        status = sky.get(sky.job_status("solo"))[job]
        [path] = sky_session.layout.home.rglob("runs/solo-*/spec.json")
        wish = json.loads(path.read_text())
    finally:
        sky.get(sky.down("solo"))
    assert status.name == "SUCCEEDED", shown
    assert "step 2/2" in shown, shown
    # The machine is gone; the model is not.
    [manifests] = (made / "uploads").glob("solo-*/manifests")
    assert stamps(path.name for path in manifests.iterdir())[-1].step == 2
    assert wish["learner"]["select"] == {"max_tasks": 8}
    sky_session.box.until("the job's end", lambda: not sky_session.box.jobs())
