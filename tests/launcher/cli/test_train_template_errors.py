"""A chat template that cannot render tool results, up to the screen of `flotilla train`."""

import asyncio
import json
from pathlib import Path

import pytest

from flotilla_launcher.cli.train import FAILED
from tests.launcher.cli.test_app import nothing_left, run_cli
from tests.support.launcher import spec
from tests.support.learner import write_tasks

WORDS = "the chat template cannot render user, assistant, tool: roles must alternate"


@pytest.mark.slow
async def test_train_ends_with_the_template_error_as_its_reason(tmp_path: Path) -> None:
    modules = {
        "learner": "tests.launcher.cli.alarming_learner",
        "rollout": "tests.launcher.cli.alarming_rollout",
        "env_gateway": "tests.support.fake_env_gateway",
    }
    learner = {
        "tasks": str(write_tasks(tmp_path / "tasks.json", 12, envs=1)),
        "steps": 2,
        "groups_per_step": 4,
        "group_size": 2,
    }
    wish = spec(
        launcher={"modules": modules},
        learner=learner,
        rollout={"words": WORDS, "unrendered": True},
    )
    wish["policy"] = {"model": "none", "max_model_len": 128}
    path, runs = tmp_path / "spec.json", tmp_path / "runs"
    path.write_text(json.dumps(wish))
    async with asyncio.timeout(100):
        code, output = await run_cli("train", str(path), "--runs", str(runs))
    print(output)
    assert code == FAILED
    screen = output[output.index("error: run fake-") :]
    assert "learner-0 exited with code 2" in screen
    reason = "rollout: the policy's input cannot be rendered, in groups of 3 different"
    assert reason in screen
    assert WORDS in screen
    assert 'rollout.dialect.name = "full"' in screen
    assert screen.count(reason) == 1, "the user reads it once"
    assert "alarm: template_error of env0" in output, "before that, after the first group"
    await nothing_left(runs)
