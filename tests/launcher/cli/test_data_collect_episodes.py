"""`flotilla data collect` from recorded episodes, replayed on the shipped apps."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla_environments.reference_policies import plan_calls
from flotilla_reading.play.solutions import read_solutions
from tests.learner.dumps.dumped_run import dumped_run, setup_of
from tests.reading.test_trajectory_export import export_here
from tests.support.doctor import emulator
from tests.support.task_collector import KEYS, TASKS, Collector

Row = dict[str, Any]


def conversation(task: Mapping[str, Any], *, calls: int | None = None, text: bool) -> list[Row]:
    """A conversation with the first `calls` of those that solve a task, with arguments as JSON text
    or as objects."""
    said: list[Row] = [{"role": "user", "content": task["prompt"]}]
    for number, (name, arguments) in enumerate(plan_calls(task)[:calls]):
        given = json.dumps(arguments) if text else arguments
        made = {"id": f"c{number}", "type": "function"}
        made |= {"function": {"name": name, "arguments": given}}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "as it was"},
        ]
    return [*said, {"role": "assistant", "content": "Done. <done>"}]


def dumped(task: Mapping[str, Any], reward: float | None, **settings: Any) -> Row:
    """A row of a dump, as far as it matters here."""
    said = conversation(task, text=False, **settings)
    row = {"task_key": task["key"], "messages": said, "reward": reward, "group_id": "g1"}
    return {**row, "no_grade": "" if reward is not None else "verifier_error", "tools": None}


def tried(task: Mapping[str, Any], attempt: int, reward: float, **settings: Any) -> Row:
    """A line of `flotilla env try --out`."""
    said = conversation(task, text=True, **settings)
    return {"task": task["key"], "attempt": attempt, "messages": said, "reward": reward}


ROWS: Sequence[Row] = (
    dumped(TASKS[0], 1.0),
    dumped(TASKS[0], 0.0, calls=1),
    # A pass whose calls do not pass any more.
    tried(TASKS[1], 1, 1.0, calls=1),
    tried(TASKS[1], 2, 0.0, calls=0),
    dumped(TASKS[2], 1.0),
    dumped(TASKS[2], None),
    tried(TASKS[3], 1, 0.0, calls=0),
    tried(TASKS[3], 2, 0.0, calls=0),
    # The shorter one does not pass any more.
    tried(TASKS[4], 1, 1.0, calls=1),
    tried(TASKS[4], 2, 1.0),
    tried(TASKS[4], 3, 0.0, calls=0),
    {**tried(TASKS[4], 4, 1.0), "task": "of another source"},
)
FATES = ("kept", "not_replayed", "undecided", "unsolved", "kept", "undecided")


@pytest.fixture
def collector(tmp_path: Path) -> Collector:
    return Collector(tmp_path)


def write_lines(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_recorded_passes_are_kept_if_their_calls_pass_again(collector: Collector) -> None:
    path = write_lines(collector.folder / "episodes.jsonl", ROWS)
    done = collector.collect("--episodes", path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{path}: episodes of tasks that the source lacks: 1" in done.stdout
    assert collector.fates() == dict(zip(KEYS, FATES, strict=True))
    assert "not_replayed: 1 of 2 passed, but no replay on a fresh instance" in done.stdout
    assert "no grade: verifier_error (tasks: 1)" in done.stdout
    solutions = read_solutions(collector.out / "solutions.jsonl")
    assert {key: len(found.calls) for key, found in solutions.items()} == {
        KEYS[0]: len(plan_calls(TASKS[0])),
        KEYS[4]: len(plan_calls(TASKS[4])),
    }
    written = [(collector.out / name).read_bytes() for name in ("evidence.jsonl", "manifest.json")]
    # The same once more: nothing is counted twice, and nothing is played.
    done = collector.collect("--episodes", path)
    assert "starting a gateway" not in done.stdout
    assert written == [
        (collector.out / name).read_bytes() for name in ("evidence.jsonl", "manifest.json")
    ]


def test_what_is_paid_for_is_named_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "a-key-of-tests")
    with emulator("a-key-of-tests") as url:
        spec = tmp_path / "paid.toml"
        table = f'[env_gateway.backends.fleet]\nurl = "{url}"\n'
        spec.write_text(f'[env_gateway]\nbackend = "fleet"\n{table}')
        collector = Collector(tmp_path, TASKS[:1], (str(spec),))
        path = write_lines(collector.folder / "episodes.jsonl", ROWS[:2])
        done = collector.collect("--episodes", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fleet charges for instances; this opens at most 1 of them" in done.stdout
    assert collector.fates() == {KEYS[0]: "kept"}


def test_demonstrations_are_read_by_datasets_and_collected_again(collector: Collector) -> None:
    from datasets import load_dataset

    path = write_lines(collector.folder / "episodes.jsonl", ROWS)
    assert collector.collect("--episodes", path).returncode == 1
    demonstrations = collector.out / "demonstrations.jsonl"
    cache = str(collector.folder / "cache")
    found = load_dataset("json", data_files=str(demonstrations), split="train", cache_dir=cache)
    rows: list[Row] = list(cast("Any", found))
    assert set(rows[0]) == {"key", "messages", "tools", "reward"}
    assert [row["key"] for row in rows] == [KEYS[0], KEYS[4]]
    for row, task in zip(rows, (TASKS[0], TASKS[4]), strict=True):
        assert row["reward"] == 1.0
        offered = {tool["function"]["name"] for tool in json.loads(row["tools"])}
        made = [c["function"] for said in row["messages"] for c in said.get("tool_calls") or ()]
        assert [(c["name"], json.loads(c["arguments"])) for c in made] == plan_calls(task)
        assert {call["name"] for call in made} <= offered
    again = Collector(collector.folder / "again")
    again.folder.mkdir()
    parquet = collector.folder / "episodes.parquet"
    table = [{"task_key": row["key"], **row} for row in collector.rows("demonstrations.jsonl")]
    pq.write_table(pa.Table.from_pylist(table), parquet)
    words = ("--episodes", parquet, "--min-graded", 1, "--max-pass-rate", 1)
    done = again.collect(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    kept = [key for key, fate in again.fates().items() if fate == "kept"]
    assert kept == [KEYS[0], KEYS[4]]
    assert again.rows("demonstrations.jsonl") == collector.rows("demonstrations.jsonl")


async def test_the_episodes_of_a_run_or_of_its_export_are_tries_at_its_tasks(
    tmp_path: Path,
) -> None:
    await dumped_run(tmp_path, setup_of(tmp_path), steps=1)
    policy = {"model": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128}
    (tmp_path / "run/spec.json").write_text(json.dumps({"name": "test", "policy": policy}))
    with closing(sqlite3.connect(tmp_path / "run/journal.sqlite")) as db:
        sql = (
            "SELECT json_extract(spec, '$.task[0]'), reward FROM trajectories JOIN groups"
            " USING (group_id)"
        )
        attempts = db.execute(sql).fetchall()
    tasks = [
        {"key": key, "env_id": "env0", "prompt": key}
        for key in sorted({key for key, _ in attempts})
    ]
    export_here(tmp_path / "run", tmp_path / "exported")
    evidence: list[list[Row]] = []
    for source in ("run", tmp_path / "exported/episodes.parquet"):
        collector = Collector(tmp_path / f"from-{Path(source).name}", tasks)
        collector.folder.mkdir()
        # Too few to judge by, so that none is replayed: their environment is a fake.
        words = ("--episodes", source, "--runs", tmp_path, "--min-graded", 99)
        done = collector.collect(*words)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "episodes of tasks" not in done.stdout
        evidence.append(collector.rows("evidence.jsonl"))
    run, exported = evidence
    assert run == exported
    found = [(row["key"], each["reward"]) for row in run for each in row["tries"]]
    assert sorted(found, key=str) == sorted(attempts, key=str)
    assert len(found) == 30
