"""Real runs with an engine configured differently from the trainer: none begins; each names why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla_learner.guard.mismatch_report import REPORT_FILE
from tests.faults.harness import FaultRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("theta", "temperature", "setting", "sentence"),
    [
        ("1e6", 1.0, "rope", "with rope_theta = 1000000"),
        # The engine ignores temperatures: all its reports are for 1.
        ("1e4", 0.7, "temperature", "those of 1, learner.temperature is 0.7"),
    ],
)
async def test_a_run_with_a_mismatch_is_refused_by_the_launcher_with_the_reason(
    new_run: Callable[..., FaultRun],
    monkeypatch: pytest.MonkeyPatch,
    theta: str,
    temperature: float,
    setting: str,
    sentence: str,
) -> None:
    monkeypatch.setenv("FLOTILLA_TEST_ROPE_THETA", theta)
    run = new_run(learner={"temperature": temperature})
    await run.train()
    assert await run.exit() != 0
    assert "engine and trainer disagree, the run does not start" in run.output, run.state()
    assert sentence in run.output
    report = json.loads((run.folder / REPORT_FILE).read_text())
    assert report["diagnosis"]["setting"] == setting
    assert run.steps() == 0
    assert run.query("SELECT * FROM checkpoints") == []
    await run.gone(10.0)


async def test_a_rollout_with_another_chat_template_gets_no_work_but_the_cause(
    new_run: Callable[..., FaultRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    wish = json.loads(run.path.read_text())
    other = shutil.copytree(wish["policy"]["model"], tmp_path / "other")
    template = json.loads((other / "tokenizer_config.json").read_text())["chat_template"]
    (other / "chat_template.jinja").write_text(f"{template} ")
    monkeypatch.setenv("FLOTILLA_TEST_FOLDER", str(other))
    await run.train()
    assert await run.exit() != 0
    assert "chat template" in run.output, run.state()
    assert "tokenizer.json" not in run.output
    assert run.steps() == 0
    await run.gone(10.0)
