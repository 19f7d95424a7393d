"""`flotilla sft`: the file of demonstrations, and what it says before the run. Runs of it are in
tests/faults/test_imitation_kill.py."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flotilla_common.episodes.demonstrations import read_demonstrations
from flotilla_launcher.cli import sft
from flotilla_launcher.cli.app import app
from flotilla_launcher.cli.train import TrainOptions
from tests.reading.demonstrations.test_run_episodes import made_run

SPEC: dict[str, Any] = {
    "name": "imitation",
    "policy": {"model": "m", "max_model_len": 64},
    "learner": {"sft": {"sequences_per_step": 3}, "steps": 2},
}


class Trained:
    """What `train` was called with, in place of a run."""

    def __init__(self) -> None:
        self.overrides: list[str] = []
        self.options = TrainOptions()

    def __call__(
        self, path: Path, runs: Path, overrides: Sequence[str], options: TrainOptions
    ) -> int:
        self.overrides, self.options = list(overrides), options
        return 0


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    found = Trained()
    monkeypatch.setattr(sft, "train_policy", found)
    return found


async def recorded(tmp_path: Path) -> str:
    run = await made_run(tmp_path)
    await run.journal.close()
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    return run.folder.name


def call(tmp_path: Path, *words: str) -> tuple[int, str]:
    runs = ("--runs", str(tmp_path / "runs"))
    result = CliRunner().invoke(app, ("sft", str(tmp_path / "spec.json"), *runs, *words))
    return result.exit_code, " ".join(result.output.split())


async def test_the_accepted_episodes_become_the_data_of_a_run_with_the_same_options(
    tmp_path: Path, trained: Trained
) -> None:
    source = await recorded(tmp_path)
    options = ("--learner.steps=9", "--best-of", "2", "--detach", "--priority", "3")
    code, said = call(tmp_path, "--from", source, *options)
    assert code == 0, said
    [file] = (tmp_path / "runs/demonstrations").iterdir()
    found = read_demonstrations(file)
    assert file.name == f"{source}-{found.sha256[:12]}.npz"
    assert found.head.selection == {"min_reward": 1.0, "best_of": 2}
    assert trained.overrides == [
        *("--learner.objective=sft", "--learner.steps=9", f"--learner.sft.data={file}")
    ]
    assert trained.options == TrainOptions(detach=True, priority=3)
    assert "4 sequences with" in said and "not accepted: 4 not the best of 2, 1 of eval" in said
    assert "An epoch is at most 2 steps of 3 sequences" in said


async def test_with_warm_start_they_become_what_the_specs_own_run_begins_with(
    tmp_path: Path, trained: Trained
) -> None:
    source = await recorded(tmp_path)
    warm = {"warm_start": {"sequences_per_step": 2, "steps": 5}, "steps": 2}
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "learner": warm}))
    code, said = call(tmp_path, "--from", source, "--warm-start", "--learner.steps=9")
    assert code == 0, said
    [file] = (tmp_path / "runs/demonstrations").iterdir()
    assert trained.overrides == ["--learner.steps=9", f"--learner.warm_start.data={file}"]
    assert "An epoch is at most 2 steps of 2 sequences" in said


async def test_the_same_episodes_are_the_same_file_and_others_leave_it_as_it_is(
    tmp_path: Path, trained: Trained
) -> None:
    source = await recorded(tmp_path)
    for words in ((), (), ("--min-reward", "0")):
        assert call(tmp_path, "--from", source, *words)[0] == 0
    files = list((tmp_path / "runs/demonstrations").iterdir())
    assert sorted(len(read_demonstrations(file).sequences) for file in files) == [4, 8]


async def test_a_run_with_nothing_to_imitate_leaves_no_file_and_starts_nothing(
    tmp_path: Path, trained: Trained
) -> None:
    source = await recorded(tmp_path)
    code, said = call(tmp_path, "--from", source, "--min-reward", "2")
    assert code == 1 and "has nothing to imitate" in said and "8 below reward 2.0" in said
    assert not trained.overrides
    assert not any((tmp_path / "runs").glob("demonstrations/*"))


async def test_a_run_that_is_not_known_is_named(tmp_path: Path, trained: Trained) -> None:
    await recorded(tmp_path)
    code, said = call(tmp_path, "--from", "none-1")
    assert code == 1 and "there are no runs in" in said
    assert not trained.overrides


async def test_a_launcher_elsewhere_has_the_runs_files_so_the_command_says_where_to_go(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await recorded(tmp_path)
    monkeypatch.setenv("FLOTILLA_LAUNCHER", json.dumps({"address": "host:1", "token": "t" * 32}))
    code, said = call(tmp_path, "--from", source)
    assert code == 1 and "use it on the machine of the launcher that FLOTILLA_LAUNCHER" in said
    assert not trained.overrides


def test_a_warm_start_needs_its_table_and_the_run_after_it(tmp_path: Path) -> None:
    source = asyncio.run(recorded(tmp_path))
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "learner": {"steps": 2}}))
    code, said = call(tmp_path, "--from", source, "--warm-start")
    assert code == 2
    for key in ("learner.warm_start.steps", "learner.warm_start.sequences_per_step"):
        assert key in said
    assert "learner.warm_start.data" not in said


def test_the_spec_of_a_run_of_rl_is_refused_by_the_keys_that_have_no_meaning(
    tmp_path: Path,
) -> None:
    source = asyncio.run(recorded(tmp_path))
    rl = {"tasks": "t.json", "groups_per_step": 2, "group_size": 8}
    spec = {**SPEC, "learner": {**SPEC["learner"], **rl}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    code, said = call(tmp_path, "--from", source)
    assert code == 2
    for key in ("learner.tasks", "learner.groups_per_step", "learner.group_size"):
        assert f"{key}: " in said
