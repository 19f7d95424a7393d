"""Evaluation sets of files that are sorted by environment, lack some, or are trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.run.task_files import load_task_files
from flotilla_learner.sampling.eval_sets import EvalSet
from tests.support.learner import make_config


def write(path: Path, sizes: dict[str, int], prefix: str = "held") -> Path:
    """Write a task file that is sorted by environment."""
    tasks = [
        {"key": f"{prefix}-{env}-{n}", "prompt": f"do {prefix} {n}", "env_id": env}
        for env, size in sizes.items()
        for n in range(size)
    ]
    path.write_text(json.dumps({"tasks": tasks}))
    return path


def config_of(tmp_path: Path, heldout: Path, **changes: Any) -> LearnerConfig:
    count = changes.pop("count", None)
    sets = [{"name": "heldout", "tasks": str(heldout), "count": count}]
    return make_config(tmp_path, eval={"sets": sets}, **changes)


def load(config: LearnerConfig) -> list[EvalSet]:
    return load_task_files(config, 0, sees_pictures=True)[1]


def test_a_count_is_spread_over_all_environments_and_said_at_the_start(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.json", {f"app{n:02}": 20 for n in range(13)})
    with capture_logs() as logs:
        (held,) = load(config_of(tmp_path, heldout, count=60))
    assert len(held.tasks) == 60
    assert len(held.by_env) == 13 and min(held.by_env.values()) == 4
    assert "'app00': 5" in str(logs) and "'app12': 4" in str(logs)
    assert "raise it" not in str(logs)


def test_a_count_takes_the_same_tasks_from_a_file_in_another_order(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.json", {"a": 9, "b": 9})
    (first,) = load(config_of(tmp_path, heldout, count=6))
    tasks = json.loads(heldout.read_text())["tasks"]
    heldout.write_text(json.dumps(tasks[::-1]))
    (other,) = load(config_of(tmp_path, heldout, count=6))
    assert [task.key for task in other.tasks] == [task.key for task in first.tasks]


def test_a_count_that_leaves_little_of_an_environment_warns(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.json", {"a": 9, "b": 9, "c": 1})
    with capture_logs() as logs:
        (held,) = load(config_of(tmp_path, heldout, count=5))
    assert held.by_env == {"a": 2, "b": 2, "c": 1}
    assert "count leaves few tasks of some environments" in str(logs)
    # What a file lacks is no fault of the count.
    (whole,) = load(config_of(tmp_path, heldout))
    assert whole.thin == []


def test_an_environment_without_held_out_tasks_is_no_error(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.json", {"env0": 4})
    with capture_logs() as logs:
        assert load(config_of(tmp_path, heldout, select={"env_keys": "env1"})) == []
        heldout.write_text('{"tasks": []}')
        assert load(config_of(tmp_path, heldout)) == []
    assert str(logs).count("an evaluation set is left out") == 2
    assert "env_keys = env1: 0 of 4; these have env0" in str(logs)
    assert "heldout.json has no tasks" in str(logs)


def test_a_training_file_without_tasks_stays_an_error(tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.json", {"env0": 4})
    config = config_of(tmp_path, heldout)
    Path(config.tasks).write_text('{"tasks": []}')
    with pytest.raises(ConfigError, match="at least one task"):
        load(config)


def test_evaluation_of_what_is_trained_on_is_refused_with_the_number_of_tasks(
    tmp_path: Path,
) -> None:
    tasks = tmp_path / "tasks.json"
    with pytest.raises(ConfigError, match=r"12 of the 12 tasks of the set 'heldout' .* trained on"):
        load(config_of(tmp_path, tasks))
    mixed = write(tmp_path / "mixed.json", {"env0": 2})
    both = json.loads(mixed.read_text())["tasks"] + json.loads(tasks.read_text())["tasks"][:1]
    mixed.write_text(json.dumps(both))
    with pytest.raises(ConfigError, match=r"1 of the 3 tasks"):
        load(config_of(tmp_path, mixed))
    # Without training no task is trained on.
    assert load(config_of(tmp_path, tasks, mode="eval"))


def test_a_task_that_is_trained_on_under_another_key_is_refused_with_both_keys(
    tmp_path: Path,
) -> None:
    heldout = write(tmp_path / "heldout.json", {"env0": 2})
    config = config_of(tmp_path, heldout)
    known = json.loads(Path(config.tasks).read_text())["tasks"]
    twins = [
        {"task_key": f"twin-{n}", "prompt": each["prompt"], "env_key": each["env_id"]}
        for n, each in enumerate(known[:5])
    ]
    # The same words about other data are another task.
    twins[4]["data_key"] = "other"
    mixed = json.loads(heldout.read_text())["tasks"] + twins
    heldout.write_text(json.dumps(mixed))
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert "4 of the 7 tasks of the set 'heldout'" in str(caught.value)
    named = "4 under another key (twin-0 as task-0, twin-1 as task-1, twin-2 as task-2 and 1 more)"
    assert named in str(caught.value)
