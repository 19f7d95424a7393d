"""Print the attempts of a run, one JSON object per line, from its journal:

    python -m flotilla_reading.attempts runs/RUN_ID/journal.sqlite --failed -n 3

Works on running and finished runs, and changes nothing. Attempts whose tokens are kept come
first, newer before older ones. The last line is {"matched": N}, the number of matches before
`-n` limits them. With `--tasks` it prints the parked or quarantined tasks instead, with the
reason."""

import argparse
import sqlite3
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Media, is_picture
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.episodes.episode_text import told_messages
from flotilla_common.process.private_process import keep_private
from flotilla_common.run_folder.journal_columns import group_task
from flotilla_common.run_folder.journal_file import JournalError, open_read_only
from flotilla_common.run_folder.trajectory_codec import outcome_fields
from flotilla_common.run_folder.trajectory_tables import trajectory_of
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_reading.attempt_filter import AttemptFilter, explain_no_match

_FROM = "FROM trajectories t JOIN groups g USING (group_id)"
_ORDER = "ORDER BY t.payload IS NULL, t.received DESC, t.attempt_index"


class NothingFoundError(Exception):
    """There is nothing to show; the message gives the reason and a suggestion."""


def query_attempts(journal: Path, wanted: AttemptFilter, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the attempts as plain values, then {"matched": N}. Raises NothingFoundError."""
    with _open_journal(journal) as connection:
        yield from _query_rows(connection, journal.absolute().parent.name, wanted, limit)


def query_inactive_tasks(journal: Path) -> list[dict[str, Any]]:
    """List the parked or quarantined tasks with their reasons. Raises NothingFoundError."""
    with _open_journal(journal) as connection:
        return _inactive_tasks(connection)


@contextmanager
def _open_journal(journal: Path) -> Generator[sqlite3.Connection]:
    if not journal.exists():
        raise NothingFoundError(
            f"{journal} does not exist: the run's learner has not started, or this is not a run"
        )
    try:
        with open_read_only(journal) as connection:
            yield connection
    except JournalError as error:
        raise NothingFoundError(str(error)) from error


def _query_rows(
    db: sqlite3.Connection, run_id: str, wanted: AttemptFilter, limit: int
) -> Iterator[dict[str, Any]]:
    where, arguments = wanted.to_sql()
    (matched,) = db.execute(f"SELECT count(*) {_FROM} WHERE {where}", arguments).fetchone()
    if not matched:
        raise NothingFoundError(explain_no_match(db, wanted, run_id))
    columns = "t.group_id, t.attempt_index, t.try, t.dropped, g.purpose, g.eval_id, g.state,"
    columns += " g.reason, g.step, g.spec, t.payload IS NULL"
    sql = f"SELECT {columns} {_FROM} WHERE {where} {_ORDER} LIMIT ?"
    for row in db.execute(sql, [*arguments, limit]).fetchall():
        yield _attempt_to_dict(db, row)
    yield {"matched": matched}


def _attempt_to_dict(db: sqlite3.Connection, row: tuple[Any, ...]) -> dict[str, Any]:
    group_id, index, attempt_try, dropped, purpose, eval_id, state, reason, step, spec, pruned = row
    trajectory = trajectory_of(db, AttemptKey(group_id, index, attempt_try))
    task = group_task(group_id, spec)
    return {
        "group_id": group_id,
        "attempt_index": index,
        "try": attempt_try,
        "purpose": purpose,
        "eval_id": eval_id,
        "step": step,
        "group_state": state,
        "dropped": dropped or reason,
        "task_key": task.task_key,
        "env_key": task.env_key,
        "task_prompt": task.find_prompt(group_id),
        "tokens_kept": not pruned,
        "worker_id": trajectory.facts.worker_id,
        "stop_reason": trajectory.stop_reason,
        **outcome_fields(trajectory),
        "sequences": [list(_spans_to_dicts(sequence)) for sequence in trajectory.sequences],
        "messages": [msgspec.to_builtins(each) for each in told_messages(trajectory)],
    }


def _spans_to_dicts(sequence: TokenSequence) -> Iterator[dict[str, Any]]:
    """Yield runs of tokens by author; a policy's with its version and their mean logprob."""
    start, sampled = 0, 0
    for span in sequence.spans:
        token_ids = sequence.token_ids[start : start + span.length].tolist()
        shown: dict[str, Any] = {"author": span.author, "token_ids": token_ids}
        media = [each for each in sequence.media if 0 <= each.token_offset - start < span.length]
        if media:
            shown["media"] = [_describe_media(each) for each in media]
        start += span.length
        if span.author is Author.POLICY and span.policy is not None:
            logprobs = sequence.logprobs[sampled : sampled + span.length]
            sampled += span.length
            shown["policy"] = f"{span.policy.run_epoch}:{span.policy.version}"
            shown["temperature"] = span.temperature
            shown["mean_logprob"] = float(np.mean(logprobs)) if span.length else 0.0
        yield shown


def _describe_media(media: Media) -> dict[str, Any]:
    """Describe media: a picture, or a text that the policy saw in part, without it if it is not
    kept."""
    about = {"bytes": media.size_bytes, "sha256": media.sha256}
    if is_picture(media.mime):
        return {**about, "picture": media.mime, "token_offset": media.token_offset}
    return {**about, "text": media.content.decode(errors="replace") if media.content else None}


def _inactive_tasks(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """List the parked and quarantined tasks with their reasons, as plain values."""
    rows = db.execute(
        "SELECT task, env, standing, groups, passes, attempts,"
        " (SELECT reason FROM curriculum_events e WHERE e.task = t.task AND kind != 'probed'"
        "  ORDER BY id DESC LIMIT 1)"
        " FROM curriculum_tasks t WHERE standing != 'active' ORDER BY standing, env, task"
    )
    return [
        {
            "task_key": task,
            "env_key": env,
            "standing": standing,
            "groups": groups,
            "pass_rate": passes / attempts if attempts else None,
            "reason": reason or "",
        }
        for task, env, standing, groups, passes, attempts, reason in rows
    ]


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_reading.attempts", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("journal", type=Path)
    parser.add_argument("--step", type=int, help="attempts that this optimizer step trained on")
    parser.add_argument("--env", help="attempts in this environment")
    parser.add_argument("--group", help="attempts of this group")
    outcome = parser.add_mutually_exclusive_group()
    outcome.add_argument("--passed", dest="passed", action="store_true", default=None)
    outcome.add_argument("--failed", dest="passed", action="store_false")
    parser.add_argument("--tasks", action="store_true", help="tasks that are parked or quarantined")
    parser.add_argument("-n", type=int, default=3, help="most attempts to print (3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parse_arguments(argv)
    wanted = AttemptFilter(chosen.step, chosen.env, chosen.group, chosen.passed)
    try:
        found = query_attempts(chosen.journal, wanted, chosen.n)
        for row in query_inactive_tasks(chosen.journal) if chosen.tasks else found:
            print_json(row)
    except NothingFoundError as error:
        print_visible(str(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
