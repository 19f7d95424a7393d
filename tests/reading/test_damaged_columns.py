"""A journal that was changed by hand: who reads it names the column, and fails in no other way."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.attempts import NothingFoundError, query_attempts
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.run_episodes import make_demonstrations
from flotilla_reading.evaluation.evaluated_attempts import EvaluationError
from flotilla_reading.evaluation.run_evaluations import read_evaluation
from flotilla_reading.inspector.queries.episodes import EpisodeShelf, RunTokenizer
from flotilla_reading.inspector.queries.group_rows import group_rows
from flotilla_reading.inspector.queries.run_folders import NotFoundError, describe_run, read_journal
from flotilla_reading.inspector.queries.step_pages import list_evals, read_eval, read_step
from flotilla_reading.kept_episodes import read_dumped_rows
from flotilla_reading.report.run_facts import read_run
from tests.reading.inspector.made_runs import MadeAttempt, conversation, open_run, run_apart

TRAINED, EVALUATED, EVAL = "g000000r0", "before-1-0-heldout-00001", "before-1-0"
NO_TASK = '{"task": ["a", "b"], "size": 1}'
# Decoders are for tokens, which none of these damages.
TOKENIZER = RunTokenizer(lambda ids: "x" * len(ids), lambda ids: ["x"] * len(ids))
TOOLS = b'[{"type": "function", "function": {"name": "find", "description": "finds"}}]'
Damage = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = open_run(tmp_path_factory.mktemp("whole") / "runs")

    async def make() -> None:
        await run.journal.begin_epoch(1)
        attempts = [MadeAttempt(conversation(2), reward, tools=TOOLS) for reward in (0.0, 1.0)]
        await run.plan_step(1, [await run.add_group(attempts)])
        await run.add_group(attempts, eval_id=EVAL, version=0)
        await run.journal.add_evaluation(EVAL, "before", 0, {"heldout": {"pass_at_1": 0.5}})
        await run.journal.close()

    run_apart(make())
    with closing(sqlite3.connect(run.folder / JOURNAL_FILE)) as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('began_with', '{\"tokenizer\": \"t\"}')")
        db.commit()
    return run.folder


@pytest.fixture
def damage(whole: Path, tmp_path: Path) -> Damage:
    """Returns a copy of the run after a change by SQL."""
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)

    def change(sql: str, *values: object) -> Path:
        with closing(sqlite3.connect(folder / JOURNAL_FILE)) as db:
            assert db.execute(sql, values).rowcount > 0
            db.commit()
        return folder

    return change


def demonstrate(folder: Path) -> object:
    return make_demonstrations(folder, folder / "out.npz", AcceptanceRules())


def show(folder: Path) -> object:
    return list(query_attempts(folder / JOURNAL_FILE, AttemptFilter(), 9))


def view_group(folder: Path) -> object:
    with read_journal(folder) as db:
        return group_rows(db, [TRAINED])


def view_step(folder: Path) -> object:
    with read_journal(folder) as db:
        return read_step(db, 1)


def view_eval(folder: Path) -> object:
    with read_journal(folder) as db:
        return list_evals(db), read_eval(db, EVAL)


def view_attempt(folder: Path) -> object:
    return EpisodeShelf(folder, TOKENIZER).read(AttemptKey(TRAINED, 0, 0))


SPEC = "UPDATE groups SET spec = ?"
RESULTS = "UPDATE evals SET results = ?"
PLAN = "UPDATE plans SET attempts = ?"
SUMMARY = "UPDATE trajectories SET summary = ?"
BEGAN = "UPDATE meta SET value = ? WHERE key = 'began_with'"
TOOLS_OF = "UPDATE tools SET tools = ?"
READERS = [
    (read_evaluation, EvaluationError, SPEC, f"the spec of group {EVALUATED}"),
    (show, NothingFoundError, SPEC, "the spec of group "),
    (demonstrate, JournalError, SPEC, "the spec of group "),
    (demonstrate, JournalError, BEGAN, "began_with in the table meta"),
    (view_group, NotFoundError, SPEC, f"the spec of group {TRAINED}"),
    (view_step, NotFoundError, PLAN, "the attempts of step 1"),
    (view_step, NotFoundError, SUMMARY, f"the summary of attempt 0, try 0, of group {TRAINED}"),
    (view_eval, NotFoundError, RESULTS, f"the results of evaluation {EVAL}"),
    (view_attempt, NotFoundError, TOOLS_OF, f"the tools of group {TRAINED}"),
]


@pytest.mark.parametrize(
    "value", ["{", '"text"', "7", "[" * 99_999, b"\xff\xfe\xff", 7], ids=lambda v: str(v)[:8]
)
@pytest.mark.parametrize(("read", "error", "sql", "where"), READERS)
def test_every_reader_names_the_damaged_column(
    read: Callable[[Path], object],
    error: type[Exception],
    sql: str,
    where: str,
    value: object,
    damage: Damage,
) -> None:
    folder = damage(sql, value)
    with pytest.raises(error) as raised:
        read(folder)
    assert str(raised.value).startswith(f"journal.sqlite is damaged: {where}")
    assert "Put back a copy from before the damage, or resume the run" in str(raised.value)


@pytest.mark.parametrize("read", dict.fromkeys(read for read, *_ in READERS))
def test_the_whole_journal_is_read_by_all_of_them(
    read: Callable[[Path], object], whole: Path
) -> None:
    assert read(whole)


@pytest.mark.parametrize(
    ("sql", "value", "where"),
    [
        (SPEC, "", "Expecting value"),
        (SPEC, NO_TASK, "Expected `array` of length 3"),
        (SPEC, '{"task": ["a", "b", "c"]}', "missing required field `size`"),
        (SPEC, '{"task": ["a", "b", "{"], "size": 1}', "the task of group"),
        (SUMMARY, "{}", "missing required field `sequences`"),
    ],
)
def test_json_without_what_is_read_of_it_is_damage_too(
    sql: str, value: str, where: str, damage: Damage
) -> None:
    with pytest.raises(NotFoundError, match=where):
        view_step(damage(sql, value))


def test_a_report_says_what_is_damaged_and_shows_the_rest(damage: Damage) -> None:
    folder = damage(SPEC, "{")
    found = read_run(folder, {})
    assert (found.rewards, len(found.evals), found.starts) == ({}, 1, 1)
    [problem] = [each for each in found.problems if "is damaged" in each]
    assert problem.startswith("Tasks cannot be compared: journal.sqlite is damaged: the spec of")


def test_the_list_of_runs_says_what_is_damaged(damage: Damage) -> None:
    card = describe_run(damage(RESULTS, "{"))
    assert "the results of the evaluation before training" in card.problem
    assert card.before is None


@pytest.mark.parametrize("line", ["{", "7", "{}", "[" * 99_999], ids=lambda v: v[:8])
def test_a_damaged_line_of_a_dump_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    path.write_text(f'{{"group_id": "g", "attempt_index": 0, "attempt_try": 0}}\n{line}\n')
    with pytest.raises(JournalError, match=r"line 2 is no row of an attempt: .*Remove the file"):
        read_dumped_rows(path)
