"""FleetTaskEnv of Fleet's fork of OpenEnv, unmodified, on the emulator and with its tasks.

The fork is on no package index. Without it, its own expressions are run on Fleet's SDK."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.fleet_openenv.backend import PATH_VARIABLE, find_fork_folder
from flotilla_env_gateway.adapters.fleet_openenv.codec import to_task_config
from flotilla_env_gateway.config.backends import FleetOpenEnvConfig
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import APPS
from flotilla_environments.tasks import make_task
from tests.env_gateway.backends.fleet_openenv_harness import PYTHON_VARIABLE
from tests.environments.fleet_emulator_process import emulating, sdk, solve

FleetTask: Any = importlib.import_module("fleet._async.tasks").Task
# Plays a task with the given calls, and prints what it earned.
PLAY = """
import json, sys
sys.path[0] = sys.argv[1]
from envs.fleet_env import FleetTaskEnv

task, calls, partial = json.loads(sys.argv[2])
env = FleetTaskEnv(task, max_steps=50, partial_reward=partial)
env.reset()
for tool, params in calls:
    env.step({"tool": tool, "params": params})
_, reward, done, _ = env.step({"tool": "submit_final_answer", "params": {"answer": "done"}})
env.close()
print("\\n" + json.dumps([reward, done, env.verifier_error]))
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulating() as address:
        yield address


def play(url: str, task: Mapping[str, Any], calls: object, *, partial: bool = False) -> list[Any]:
    """Play in a process of its own, with what the fork needs."""
    if not os.environ.get(PATH_VARIABLE):
        pytest.skip(f"set {PATH_VARIABLE} to a checkout of Fleet's fork of OpenEnv")
    config = to_task_config(parse_task(json.dumps(task)))
    folder: Path = find_fork_folder(FleetOpenEnvConfig())
    command = [os.environ.get(PYTHON_VARIABLE, sys.executable), "-c", PLAY, str(folder)]
    played = subprocess.run(
        [*command, json.dumps([config, calls, partial])],
        env=os.environ | {"FLEET_BASE_URL": url, "FLEET_API_KEY": "sk-test"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert played.returncode == 0, played.stderr
    return json.loads(played.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("app", APPS)
def test_the_unmodified_fork_grades_the_repositorys_tasks(url: str, app: str) -> None:
    task = make_task(app, "train", 0)
    assert play(url, task, plan_calls(task)) == [1.0, True, None]
    assert play(url, task, []) == [0.0, True, None]


@pytest.mark.timeout(300)
def test_the_unmodified_fork_reads_the_printed_checks(url: str) -> None:
    task = make_task("tracker", "train", 0)
    reward, _, error = play(url, task, plan_calls(task)[:-1], partial=True)
    assert 0.0 < reward < 1.0 and error is None


@pytest.mark.parametrize("app", APPS)
async def test_what_fleets_sdk_returns_of_a_verifier_is_a_number(
    url: str, app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FleetTaskEnv verifies: `float(response.result)` of a task with only these fields."""
    monkeypatch.setenv("FLEET_BASE_URL", url)
    monkeypatch.setenv("FLEET_API_KEY", "sk-test")
    made = make_task(app, "train", 0)
    task = FleetTask(
        key=made["key"],
        prompt=made["prompt"],
        env_id=app,
        verifier_func=made["verifier_func"],
    )
    fleet = sdk.AsyncFleet()
    env: Any = await fleet.make(app, data_key=made["data_id"])
    scores: list[float] = []
    for solved in (False, True):
        if solved:
            solve(env.urls.root, app, made["data_id"], ("mcp", "mcp"))
        response = await task.verify_detailed_async(env, final_answer="done")
        assert response.success and type(response.result) is int
        scores.append(float(response.result))
        assert "_ACCUMULATOR >>>" in response.stdout
    assert scores == [0.0, 1.0]
    await env.close()
    await fleet.client.httpx_client.aclose()
