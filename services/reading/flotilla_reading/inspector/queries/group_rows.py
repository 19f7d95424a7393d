"""Groups and their attempts, as rows of a page."""

import sqlite3
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.domain.token_authors import Author
from flotilla_common.run_folder.journal_columns import decode_column, group_task

# Names in one SQL statement.
_CHUNK = 500
# Columns of a try, of `trajectories`, for `to_try`.
TRY = "group_id, attempt_index, try, reward, failure, summary, received, dropped"
_GROUP = "group_id, purpose, eval_id, spec, state, reason, step"


class _Span(msgspec.Struct, array_like=True):
    author: str
    length: int


class _Turn(msgspec.Struct, array_like=True):
    generate_s: float
    tools_s: float


class _Sequence(msgspec.Struct):
    tokens: int
    spans: list[_Span]


class _Counts(msgspec.Struct):
    turns: int
    tool_calls: int


class _Summary(msgspec.Struct):
    """What a row shows of the column `summary` of an attempt."""

    sequences: list[_Sequence]
    turns: list[_Turn]
    stop_reason: str | None
    counts: _Counts
    checks_passed: list[str]
    checks_failed: list[str]
    # Not in journals before format 9.
    judged: bool = False


@dataclass(frozen=True, slots=True)
class TryRow:
    """One try at one attempt. `received` is in unix seconds; `unused` is why it is not used."""

    group_id: str
    index: int
    attempt_try: int
    reward: float | None
    ended: str
    unused: str
    received: float
    turns: int
    tool_calls: int
    checks_passed: int
    checks_failed: int
    tokens: int
    policy_tokens: int
    seconds: float
    # Its reward is a judge's score, or will be.
    judged: bool = False

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.group_id, self.index, self.attempt_try)

    @property
    def passed(self) -> bool:
        return not self.judged and self.reward is not None and self.reward >= PASS_REWARD


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group; `rewards` are those of its used, graded tries, in order of attempt."""

    group_id: str
    purpose: str
    eval_id: str
    state: str
    reason: str
    step: int | None
    rewards: tuple[float, ...]
    task_key: str = ""
    env_key: str = ""
    prompt: str = ""
    size: int = 0
    # Worst first; empty until `with_tries`.
    tries: tuple[TryRow, ...] = ()
    # Its rewards are a judge's scores, which pass nothing.
    judged: bool = False

    @property
    def signal(self) -> float:
        """Population variance of the rewards, from which the policy learns."""
        return statistics.pvariance(self.rewards) if self.rewards else 0.0

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def passes(self) -> int:
        return 0 if self.judged else sum(reward >= PASS_REWARD for reward in self.rewards)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a table that a page looked at: numbers `first` to `last` of `total`, in order of
    arrival."""

    first: int
    last: int
    total: int

    @property
    def before(self) -> int | None:
        """Where a look at older rows begins; None without any."""
        return self.first if self.first > 1 else None


def window_of(db: sqlite3.Connection, table: str, before: int | None, most: int) -> Window:
    """Return the newest rows of a table, or those before a row."""
    # No row of the journal's groups and attempts is ever removed: they have all the numbers.
    (total,) = db.execute(f"SELECT coalesce(max(rowid), 0) FROM {table}").fetchone()
    last = total if before is None else max(min(before - 1, total), 0)
    return Window(max(last - most, 0) + 1, last, total)


def group_rows(db: sqlite3.Connection, group_ids: Sequence[str]) -> list[GroupRow]:
    """Load groups with their rewards, in the order of their ids; unknown ones are left out."""
    rewards, judged = _rewards_of(db, group_ids)
    found = {
        row[0]: replace(_to_group(row, rewards.get(row[0], ())), judged=row[0] in judged)
        for chunk, marks in _chunks(group_ids)
        for row in db.execute(f"SELECT {_GROUP} FROM groups WHERE group_id IN ({marks})", chunk)
    }
    return [found[group_id] for group_id in group_ids if group_id in found]


def with_tries(db: sqlite3.Connection, group: GroupRow) -> GroupRow:
    """Add a group's tries, worst first: by reward, then by failed checks; those without a
    reward come last."""
    rows = db.execute(f"SELECT {TRY} FROM trajectories WHERE group_id = ?", (group.group_id,))
    tries = [to_try(row) for row in rows]
    return replace(group, tries=tuple(sorted(tries, key=_badness)))


def _badness(row: TryRow) -> tuple[Any, ...]:
    unknown = row.reward is None
    return (unknown, bool(row.unused), row.reward or 0.0, -row.checks_failed, row.index)


def _rewards_of(
    db: sqlite3.Connection, group_ids: Sequence[str]
) -> tuple[dict[str, tuple[float, ...]], set[str]]:
    """Return the rewards of groups, and which of them are judged."""
    found: dict[str, list[float]] = {}
    judged = set[str]()
    for chunk, marks in _chunks(group_ids):
        # A damaged summary is named where it is read.
        sql = (
            "SELECT group_id, reward, CASE WHEN json_valid(summary)"
            " THEN json_extract(summary, '$.judged') END FROM trajectories"
            f" WHERE group_id IN ({marks})"
            " AND reward IS NOT NULL ORDER BY group_id, attempt_index, try"
        )
        for group_id, reward, by_judge in db.execute(sql, chunk):
            found.setdefault(group_id, []).append(reward)
            if by_judge:
                judged.add(group_id)
    return {group_id: tuple(rewards) for group_id, rewards in found.items()}, judged


def _chunks(values: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        yield chunk, ", ".join("?" * len(chunk))


def _to_group(row: tuple[Any, ...], rewards: Iterable[float]) -> GroupRow:
    group_id, purpose, eval_id, spec, state, reason, step = row
    task = group_task(group_id, spec)
    return GroupRow(
        group_id=group_id,
        purpose=purpose,
        eval_id=eval_id,
        state=state,
        reason=reason,
        step=step,
        rewards=tuple(rewards),
        task_key=task.task_key,
        env_key=task.env_key,
        prompt=task.find_prompt(group_id),
        size=task.size,
    )


def to_try(row: tuple[Any, ...]) -> TryRow:
    """Return a row of the columns `TRY`."""
    group_id, index, attempt_try, reward, failure, summary, received, dropped = row
    where = f"the summary of attempt {index}, try {attempt_try}, of group {group_id}"
    data = decode_column(summary, _Summary, where)
    spans = [span for each in data.sequences for span in each.spans]
    return TryRow(
        group_id=group_id,
        index=index,
        attempt_try=attempt_try,
        reward=reward,
        ended=failure or data.stop_reason or "",
        unused=dropped,
        received=received,
        turns=data.counts.turns,
        tool_calls=data.counts.tool_calls,
        checks_passed=len(data.checks_passed),
        checks_failed=len(data.checks_failed),
        tokens=sum(each.tokens for each in data.sequences),
        policy_tokens=sum(span.length for span in spans if span.author == Author.POLICY),
        seconds=sum(turn.generate_s + turn.tools_s for turn in data.turns),
        judged=data.judged,
    )
