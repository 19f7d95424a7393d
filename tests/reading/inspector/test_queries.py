"""Reads of the inspector, which cost the same in a run of any length."""

import json
import sqlite3
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.token_stats import stats_path
from flotilla_learner.journal.schema import TABLES
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.queries import (
    attempt_search,
    live_board,
    step_pages,
    task_groups,
)
from flotilla_reading.inspector.queries.attempt_search import AttemptSearch
from flotilla_reading.inspector.queries.run_folders import read_journal
from flotilla_reading.inspector.queries.run_library import RunLibrary
from flotilla_reading.metric_series import MetricSeries
from flotilla_rollout.dialects import full
from tests.reading.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)


@pytest.fixture
def db(made_run: MadeRun) -> Generator[sqlite3.Connection]:
    with read_journal(made_run.folder) as found:
        yield found


def test_groups_come_by_signal_and_attempts_from_the_worst(db: sqlite3.Connection) -> None:
    found = step_pages.read_step(db, 3)
    groups = found.trained.groups
    assert [group.group_id for group in groups] == ["g000011r0", "g000010r0"]
    assert groups[0].signal == pytest.approx(0.25)
    assert [row.reward for row in groups[0].tries] == [0.0, 0.0, 1.0, 1.0, None]
    assert groups[0].tries[-1].ended == "env_lost"
    assert found.trained.worst == groups[0].tries[0]
    assert (found.earlier, found.later) == (2, None)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_lists_what_was_dropped_since_the_one_before(
    db: sqlite3.Connection, step: int
) -> None:
    found = step_pages.read_step(db, step)
    first = 5 * (step - 1)
    assert [group.group_id for group in found.filtered] == [f"g{first + 2:06d}r0"]
    dropped = [(group.group_id, group.reason) for group in found.dropped]
    after = [f"g{first + 3:06d}r0"] if step == 3 else []
    before = [f"g{first - 2:06d}r0"] if step > 1 else []
    assert dropped == [(group_id, "stale") for group_id in before + after]


async def test_the_groups_without_signal_that_a_step_trained_on_count_as_such(
    tmp_path: Path,
) -> None:
    made = open_run(tmp_path)
    talk = conversation(1)
    groups = [
        await made.add_group([MadeAttempt(talk, reward) for reward in rewards])
        for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.5, 0.5))
    ]
    left_out = await made.add_group([MadeAttempt(talk, 1.0)] * 2)
    await made.plan_step(1, groups, [left_out])
    await made.journal.close()
    with read_journal(made.folder) as db:
        found = step_pages.read_step(db, 1)
    assert (found.trained.total, len(found.filtered), found.without_signal) == (4, 1, 4)


def test_an_evaluation_has_the_groups_of_its_own_name(db: sqlite3.Connection) -> None:
    found = step_pages.read_eval(db, "after-1-3")
    assert found.card.results["heldout"]["pass_at_1"] == 0.5
    assert [group.eval_id for group in found.groups.groups] == ["after-1-3"]


def test_the_live_board_counts_what_is_in_flight(made_run: MadeRun) -> None:
    board = live_board.read_live_board(made_run.folder)
    assert board.received == len(made_run.trajectories)
    assert (board.open_groups, board.waiting_groups) == (3, 0)
    assert {(group.received, group.size) for group in board.groups} == {(1, 3)}
    assert board.groups[0].worker_id == "worker-0"
    newest = [row.group_id for row in board.arrivals[:2]]
    assert newest == ["after-1-3-heldout-00015"] * 2


def test_no_page_scans_a_table_of_the_journal(made_run: MadeRun) -> None:
    """Every statement that a page runs finds its rows by an index; small tables may be read."""
    small = {"evals", "json_each"}
    seen: list[str] = []
    with read_journal(made_run.folder) as db:
        db.set_trace_callback(seen.append)
        step_pages.list_steps(db)
        step_pages.read_step(db, 3)
        step_pages.read_step(db, 2)
        step_pages.list_evals(db)
        step_pages.read_eval(db, "after-1-3")
        task_groups.read_task(db, "booking-001")
        attempt_search.newest_environments(db)
        search = AttemptSearch(AttemptFilter(env_key="booking", ended="done"), before=9)
        attempt_search.search_attempts(db, search, lambda *_: None)
        ids = ["g000004r0"]
        live_board._open_groups(db, ids)  # pyright: ignore[reportPrivateUsage]
        live_board._newest_tries(db)  # pyright: ignore[reportPrivateUsage]
        live_board._count(db)  # pyright: ignore[reportPrivateUsage]
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(TABLES)
        for statement in set(seen):
            for *_, plan in empty.execute(f"EXPLAIN QUERY PLAN {statement}"):
                words = plan.split()
                bounded = statement.rstrip().endswith(("LIMIT 12", "LIMIT 50"))
                assert words[0] != "SCAN" or words[1] in small or bounded, (plan, statement)


def test_metrics_are_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricSeries(path)
    assert metrics.names() == []
    path.write_text('{"step": 1, "time": 1.0, "a": 1.5, "b": null, "h": {"edges": []}}\n{"ste')
    assert metrics.names() == ["a"]
    with path.open("a") as file:
        file.write('p": 2, "a": 2.5}\nnot json\n')
    assert metrics.series("a") == ([1, 2], [1.5, 2.5])
    assert metrics.newest() == {"a": 2.5}
    assert metrics.at_step(["a", "b"], [1, 3]) == {1: {"a": 1.5}, 3: {}}
    path.unlink()
    path.write_text('{"step": 7, "a": 3}\n')
    assert metrics.series("a") == ([7], [3.0])
    with path.open("a") as file:
        file.write(f'{{"step": {"9" * 30}, "a": 4}}\n{{"step": 8, "a": {"9" * 400}, "b": 1e999}}\n')
    assert metrics.series("a") == ([7], [3.0])


async def _made_run(runs: Path) -> MadeRun:
    run = open_run(runs)
    await run.journal.begin_epoch(1)
    group = await run.add_group([MadeAttempt(conversation(2), 1.0)] * 2)
    await run.plan_step(1, [group])
    await run.journal.close()
    return run


KEY = AttemptKey("g000000r0", 0, 0)


def test_tokens_without_statistics_show_why(tmp_path: Path) -> None:
    run = run_apart(_made_run(tmp_path / "runs"))
    path = stats_path(run.folder, 1)
    path.write_bytes(path.read_bytes()[:100])
    library = RunLibrary(tmp_path / "runs", load_run_tokenizer)
    track = library.open(RUN).shelf.read(KEY).tracks[0]
    assert "damaged" in track.note
    assert np.isnan(track.advantages).all() and not np.isnan(track.logprobs).all()
    path.unlink()
    (path.parent / "pruned.jsonl").write_text('{"step": 1, "reason": "older than 20 steps"}\n')
    library = RunLibrary(tmp_path / "runs", load_run_tokenizer)
    assert library.open(RUN).shelf.read(KEY).tracks[0].note.endswith("older than 20 steps")


def test_without_its_tokenizer_an_episode_reads_as_numbers(tmp_path: Path) -> None:
    run = run_apart(_made_run(tmp_path / "runs"))
    (tmp_path / "model/tokenizer.json").unlink()
    shelf = RunLibrary(tmp_path / "runs", load_run_tokenizer).open(RUN).shelf
    episode = shelf.read(KEY)
    first = int(run.trajectories[KEY].sequences[0].token_ids[0])
    assert episode.texts_of(0, 0, 1) == [f"[{first}]"]
    assert "tokenizer.json" in episode.tokenizer.problem


def test_pruned_tokens_are_missed_and_the_outcome_stays(tmp_path: Path) -> None:
    run = run_apart(_made_run(tmp_path / "runs"))
    with closing(sqlite3.connect(run.folder / "journal.sqlite")) as db, db:
        db.execute("UPDATE trajectories SET payload = NULL")
    episode = RunLibrary(tmp_path / "runs", load_run_tokenizer).open(RUN).shelf.read(KEY)
    assert episode.pruned and episode.tracks == ()
    assert episode.row.reward == 1.0


COMPUTER = {
    "name": "computer",
    "description": "Coordinates are [x, y] with x from 0 to 999 and y from 0 to 999.",
    "parameters": {"type": "object"},
}


@pytest.mark.parametrize("told", ["by the template", "by the dialect", "wrongly", "not at all"])
def test_tools_are_known_whether_template_or_dialect_explains_them(
    told: str, tmp_path: Path
) -> None:
    schemas = [{"type": "function", "function": COMPUTER}]
    said = full.system_text(schemas)
    said = {"by the dialect": said, "wrongly": said.partition("parameters")[0]}.get(told, "")
    (author, _), *rest = conversation(2)
    prompt = f"<|im_start|>system\n{said}<|im_end|>\n" if said else ""
    prompt += "<|im_start|>user\nOpen the mail.<|im_end|>\n<|im_start|>assistant\n"
    tools = json.dumps(schemas).encode() if told == "by the template" else b""

    async def make() -> None:
        run = open_run(tmp_path / "runs")
        await run.journal.begin_epoch(1)
        await run.add_group([MadeAttempt([(author, prompt), *rest], 1.0, tools=tools)])
        await run.journal.close()

    run_apart(make())
    episode = RunLibrary(tmp_path / "runs", load_run_tokenizer).open(RUN).shelf.read(KEY)
    known = {"computer": COMPUTER["description"]}
    assert episode.tools == (known if told.startswith("by") else {})


def test_windows_of_tokens_have_the_texts_of_the_whole(tmp_path: Path) -> None:
    run = run_apart(_made_run(tmp_path / "runs"))
    episode = RunLibrary(tmp_path / "runs", load_run_tokenizer).open(RUN).shelf.read(KEY)
    count = len(run.trajectories[KEY].sequences[0].token_ids)
    whole = episode.texts_of(0, 0, count)
    parts = [text for start in range(0, count, 7) for text in episode.texts_of(0, start, start + 7)]
    assert parts == whole


def test_a_journal_of_another_schema_is_a_problem_in_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "runs/old"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "journal.sqlite")) as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("INSERT INTO meta VALUES ('schema_version', '1')")
        db.commit()
    (card,) = RunLibrary(tmp_path / "runs", load_run_tokenizer).cards()
    assert card.run_id == "old" and "format 1" in card.problem


def test_a_run_that_a_learner_locks_is_running(tmp_path: Path) -> None:
    from flotilla_learner.journal.store import lock_journal

    run = run_apart(_made_run(tmp_path / "runs"))
    (run.folder / "spec.json").write_text(json.dumps({"learner": {"steps": 2}}))
    library = RunLibrary(tmp_path / "runs", load_run_tokenizer)
    assert library.cards()[0].state == "stopped"
    lock = lock_journal(run.folder)
    assert library.cards()[0].state == "running"
    lock.close()
    assert library.cards()[0].state == "stopped"


@pytest.mark.parametrize("results", ["[]", "{", '{"heldout": [1]}'])
def test_a_damaged_run_hides_no_other_in_the_list(tmp_path: Path, results: str) -> None:
    run = run_apart(_made_run(tmp_path / "runs"))
    (run.folder / "summary.json").write_text('{"steps": "many"}')
    with closing(sqlite3.connect(run.folder / "journal.sqlite")) as db:
        db.execute(
            "INSERT INTO evals (eval_id, moment, version, results) VALUES "
            "('after-1-1', 'after', 1, ?)",
            (results,),
        )
        db.commit()
    (card,) = RunLibrary(tmp_path / "runs", load_run_tokenizer).cards()
    assert (card.run_id, card.steps, card.after) == (RUN, 1, None)
