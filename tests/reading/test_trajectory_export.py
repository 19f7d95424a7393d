"""`flotilla export-trajectories`: its rows, and its messages about rows that it cannot write.

Most tests call the command in this process or in a fork."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from flotilla_common.domain.attempts import Purpose
from flotilla_common.episodes.episode_rows import key_of_row
from flotilla_common.process.python_command import python_command
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_launcher.cli.app import app
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.journal.store import open_journal
from flotilla_learner.sampling.tasks import Task
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.kept_episodes import KeptEpisodes
from tests.learner.dumps.dumped_run import dumped_run, setup_of
from tests.support.launcher import forged_command
from tests.support.repository import ROOT
from tests.support.rollout import POLICY, FakeEnvironment, attempt, runner, tokenizer


def export(
    tmp_path: Path,
    *arguments: str,
    run: str = "run",
    command: Callable[..., Sequence[str]] = forged_command,
) -> subprocess.CompletedProcess[str]:
    program = command("-m", "flotilla_launcher.cli.app", "export-trajectories", run)
    given = ("--runs", str(tmp_path), *arguments)
    return subprocess.run([*program, *given], cwd=ROOT, capture_output=True, text=True, check=False)


def export_here(run: Path, out: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and all that it prints."""
    command = ("export-trajectories", run.name, "--runs", str(run.parent), "--out", str(out))
    result = CliRunner().invoke(app, (*command, *arguments))
    return result.exit_code, result.output


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with 6 attempts, and evaluations of 4 each."""
    folder = tmp_path_factory.mktemp("dumped")
    await dumped_run(folder, setup_of(folder), steps=1)
    policy = {"model": str(folder / "model"), "dtype": "float32", "max_model_len": 128}
    spec = {"name": "test", "policy": policy}
    (folder / "run" / "spec.json").write_text(json.dumps(spec))
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of `finished`, to be changed."""
    return shutil.copytree(finished, tmp_path / "run")


def query(run: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run / "journal.sqlite")) as db, db:
        return db.execute(sql).fetchall()


def test_parquet_has_every_attempt_with_the_numbers_of_journal_and_trainer(
    run: Path, tmp_path: Path
) -> None:
    done = export(tmp_path, "--out", str(tmp_path / "out"), command=python_command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Wrote 30 episodes of run" in done.stdout
    rows = pq.read_table(tmp_path / "out/episodes.parquet").to_pylist()
    stats = read_token_stats(stats_path(run, 1))
    assert sorted({row["purpose"] for row in rows}) == ["eval", "train"]
    for row in (row for row in rows if row["purpose"] == "train"):
        [sequence] = row["sequences"]
        numbers = stats.sequences[key_of_row(row), 0]
        assert sequence["trained"] == numbers.trained
        assert sequence["advantages"] == pytest.approx(numbers.advantages.tolist(), abs=1e-6)
        assert len(sequence["token_ids"]) == sum(span["length"] for span in sequence["spans"])


def test_datasets_reads_the_folder_with_a_split_for_evaluations(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export_here(run, out, "--format", "datasets")[0] == 0
    from datasets import load_dataset

    found = load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in found.items()} == {"train": 6, "test": 24}
    row = found["train"][0]
    assert [message["role"] for message in row["messages"]][:2] == ["user", "assistant"]
    assert row["reward"] in (0.0, 1.0) and row["passed"] == (row["reward"] == 1.0)


async def test_a_chat_template_makes_the_sampled_tokens_of_messages_and_tools(
    tmp_path: Path,
) -> None:
    """What the template wrote about the tools by itself is left out: it would write it again."""
    turns = [
        '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>',
        "It is there.",
    ]
    played = await runner(FakeEnvironment(), turns).run_attempt(attempt())
    group = GroupSpec("g", 0, Task("t", "env", '{"prompt": "Find it."}'), Purpose.TRAIN, 1, 1.0)
    journal = open_journal(tmp_path / "run")
    await journal.begin_epoch(1)
    await journal.add_lease(Lease("l", group, ((0, 0),), POLICY, "w", 1.0), "i", "r", 1)
    assert await journal.add_trajectory(played)
    await journal.close()
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        episodes = KeptEpisodes(db, tmp_path / "run", tokenizer().decode)
        [row] = episodes.find_rows(AttemptFilter(None, None, None, None))
    assert row is not None
    assert [each["role"] for each in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    text = tokenizer().apply_chat_template(row["messages"], json.loads(row["tools"]), False)
    sampled = played.sequences[0].token_ids.tolist()
    assert tokenizer().encode(text)[: len(sampled)] == sampled


def test_filters_choose_attempts(run: Path, tmp_path: Path) -> None:
    [(passed,)] = query(run, "SELECT count(*) FROM trajectories WHERE reward >= 1")
    code, said = export_here(run, tmp_path / "passed", "--passed")
    assert code == 0 and f"Wrote {passed} episodes of run to" in said and "omitted" not in said
    done = export(tmp_path, "--out", str(tmp_path / "one"), "--env", "env0", "--step", "1")
    assert "Wrote 2 episodes" in done.stdout


def test_pruned_attempts_come_from_their_dumps_or_are_counted(run: Path, tmp_path: Path) -> None:
    query(run, "UPDATE trajectories SET payload = NULL")
    code, said = export_here(run, tmp_path / "all")
    assert code == 0 and "Wrote 30 episodes of run to" in said and "omitted" not in said
    (run / "rollouts/step_1.jsonl").unlink()
    done = export(tmp_path, "--out", str(tmp_path / "evals"))
    assert "Wrote 24 episodes of run" in done.stdout
    assert "6 more are omitted: their tokens were pruned" in done.stdout
    code, said = export_here(run, tmp_path / "none", "--step", "1")
    assert code == 2 and "the tokens of all 6 matching attempts were pruned" in said
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env", "bank"), "no environment 'bank'; run run has: env0, env1, env2"),
        (("--step", "7"), "no attempts of step 7; run run has steps: 1 to 1"),
    ],
)
def test_what_is_not_there_is_named(
    run: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    code, said = export_here(run, tmp_path / "out", *arguments)
    assert code == 2 and message in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_named(run: Path, tmp_path: Path) -> None:
    done = export(tmp_path, "--out", str(tmp_path / "out"), "--format", "csv")
    assert done.returncode == 2
    assert "csv" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(run: Path, tmp_path: Path) -> None:
    """Check the command's exit code too, which is the program's."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    done = export(tmp_path, "--out", str(out))
    assert done.returncode == 2 and "already exists" in done.stderr
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    done = export(tmp_path, "--out", str(tmp_path / "out"), run="nothing")
    assert done.returncode == 1
    assert "there are no runs in" in done.stdout
