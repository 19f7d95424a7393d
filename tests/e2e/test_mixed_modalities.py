"""One run trains a vision model on tasks with tools, on a screen and in a browser, through Fleet's
interfaces: all are graded and trained on, and pictures are where the policy saw some."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from flotilla_environments.tasks import make_task
from tests.e2e.finished_run import FinishedRun, processes_of, train
from tests.support.vision_runs import VERIFIER

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # What transformers and torch warn about is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

STEPS = 2
ATTEMPTS = 4
SCREENS = ("computer_use", "browser_use")
MODALITIES = ("tool_use", *SCREENS)
# Of the emulator's screen of 1366 x 768, as the policy is shown it.
SIDE, SHOWN = 320, (320, 180)
# The tiny tokenizer has a token for nearly each character of a tool's schema.
MOST_TOKENS = 12_288


def lengthen(model: Path, folder: Path) -> Path:
    """Return a copy of a tiny model for longer texts than it is made for."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = MOST_TOKENS
    path.write_text(json.dumps(config))
    return folder


def write_tasks(folder: Path) -> str:
    """Tasks of one environment in each modality, so many that every step has one of each."""
    tasks = [
        make_task("booking", "train", number)
        | {"key": f"{modality}-{number}", "task_modality": modality, "verifier_func": VERIFIER}
        for number in range(STEPS)
        for modality in MODALITIES
    ]
    path = folder / "tasks.json"
    path.write_text(json.dumps({"tasks": tasks}))
    return str(path)


def write_spec(model: Path, folder: Path) -> Path:
    policy: dict[str, Any] = {"model": str(model), "dtype": "float32", "vision": {}}
    emulator = ["python", "-P", "-m", "flotilla_environments.fleet_emulator", "--die-with-parent"]
    spec = {
        "name": "mixed",
        "policy": policy | {"max_model_len": MOST_TOKENS},
        "env_gateway": {
            "backend": "fleet",
            "backends": {"fleet": {"command": emulator}},
            "screen": {"max_side": SIDE},
        },
        "rollout": {
            "max_attempts": 12,
            "max_turns": 2,
            "max_input_length": MOST_TOKENS - 64,
            "max_generate_length": 24,
            "dialect": {"name": "full", "finish": "done"},
            "engine": {"device": "cpu", "max_num_seqs": 12},
        },
        "learner": {
            "tasks": write_tasks(folder),
            "steps": STEPS,
            "groups_per_step": len(MODALITIES),
            "group_size": ATTEMPTS,
            "max_staleness": 0,
            "optimizer": {"lr": 1e-3},
        },
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="module")
def model(vision_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lengthen(vision_folder("qwen3_vl"), tmp_path_factory.mktemp("long") / "model")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("mixed")
    run = train(write_spec(model, folder), folder / "runs", timeout_s=800.0)
    assert run.exit_code == 0, run.output
    return run


def modalities(run: FinishedRun) -> dict[str, str]:
    """The modality of each group's task."""
    keys = run.rows("SELECT group_id, json_extract(spec, '$.task[0]') FROM groups")
    return {group: key.rpartition("-")[0] for group, key in keys}


def test_attempts_of_all_modalities_are_graded_and_trained_on(finished: FinishedRun) -> None:
    attempts, modality_of = finished.trajectories(), modalities(finished)
    assert [each.detail for each in attempts if not each.is_graded] == []
    plans = [json.loads(text) for (text,) in finished.rows("SELECT attempts FROM plans")]
    trained = Counter(modality_of[group] for plan in plans for group, *_ in plan)
    assert trained == dict.fromkeys(MODALITIES, STEPS * ATTEMPTS)
    rows = finished.metrics("policy/grad_norm")
    assert len(rows) == STEPS
    assert all(row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0 for row in rows)


def test_one_worker_is_leased_tasks_of_all_modalities(finished: FinishedRun) -> None:
    leases = finished.rows("SELECT worker_id, group_id FROM leases")
    modality_of = modalities(finished)
    assert len({worker for worker, _ in leases}) == 1
    assert {modality_of[group] for _, group in leases} == {*MODALITIES}


def test_pictures_are_where_the_policy_saw_a_screen(finished: FinishedRun, model: Path) -> None:
    modality_of = modalities(finished)
    family = load_vision_family(model, VisionConfig())
    kept = {group for (group,) in finished.rows("SELECT DISTINCT group_id FROM pictures")}
    assert kept == {group for group, modality in modality_of.items() if modality in SCREENS}

    def grids(attempt: Trajectory) -> set[tuple[int, ...]]:
        return {item.grid for sequence in attempt.sequences for item in sequence.pictures}

    for attempt in finished.trajectories():
        seen = modality_of[attempt.key.group_id] in SCREENS
        assert grids(attempt) == ({family.grid(*SHOWN)} if seen else set())


def test_nothing_is_left_of_instances_browsers_and_processes(finished: FinishedRun) -> None:
    assert finished.rows("SELECT * FROM instances", "env_gateway-0.sqlite") == []
    assert processes_of(finished.runs) == []
    assert list(SHARED_MEMORY.glob(f"*{finished.folder.name}*")) == []
