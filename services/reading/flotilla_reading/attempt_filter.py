"""Choice of a run's attempts in its journal."""

import sqlite3
from dataclasses import dataclass
from typing import Any

from flotilla_common.domain.pass_rates import PASS_REWARD

_ENDED = "coalesce(t.failure, json_extract(t.summary, '$.stop_reason'))"
# A judge's score passes nothing. Not in journals before format 9.
_GRADED = "coalesce(json_extract(t.summary, '$.judged'), 0) = 0"
_TOOL_ERRORS = "json_extract(t.summary, '$.counts.tool_errors')"


@dataclass(frozen=True, slots=True)
class AttemptFilter:
    """Filter of attempts; None matches all. `passed` means a reward of at least 1, False
    everything else, including tries without a reward, which `graded` excludes or, if False,
    selects. `ended` is a stop reason or a kind of failure."""

    step: int | None = None
    env_key: str | None = None
    group_id: str | None = None
    passed: bool | None = None
    graded: bool | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    ended: str | None = None
    tool_errors: bool | None = None

    def to_sql(self) -> tuple[str, tuple[Any, ...]]:
        """Return an SQL condition on `trajectories t` and `groups g`, and its arguments."""
        sign = "=" if self.passed else "!="
        conditions: list[tuple[str, Any, Any]] = [
            ("g.step = ?", self.step, self.step),
            ("json_extract(g.spec, '$.task[1]') = ?", self.env_key, self.env_key),
            ("g.group_id = ?", self.group_id, self.group_id),
            (f"({_GRADED} AND coalesce(t.reward, -1) >= ?) {sign} 1", self.passed, PASS_REWARD),
            ("(t.reward IS NOT NULL) = ?", self.graded, self.graded),
            ("t.reward >= ?", self.least_reward, self.least_reward),
            ("t.reward <= ?", self.most_reward, self.most_reward),
            (f"{_ENDED} = ?", self.ended, self.ended),
            (f"({_TOOL_ERRORS} != '{{}}') = ?", self.tool_errors, self.tool_errors),
        ]
        given = [(text, value) for text, wanted, value in conditions if wanted is not None]
        text = " AND ".join(text for text, _ in given) or "1"
        return text, tuple(value for _, value in given)


def explain_no_match(db: sqlite3.Connection, wanted: AttemptFilter, run_id: str) -> str:
    """Return the reason why the filter matches no attempt of the run."""
    (received,) = db.execute("SELECT count(*) FROM trajectories").fetchone()
    if not received:
        return f"run {run_id} has no attempts yet"
    first, last = db.execute("SELECT min(step), max(step) FROM plans").fetchone()
    if wanted.step is not None and not (first is not None and first <= wanted.step <= last):
        steps = "none yet" if first is None else f"{first} to {last}"
        return f"no attempts of step {wanted.step}; run {run_id} has steps: {steps}"
    envs = db.execute("SELECT DISTINCT json_extract(spec, '$.task[1]') FROM groups ORDER BY 1")
    known = [str(env) for (env,) in envs]
    if wanted.env_key is not None and wanted.env_key not in known:
        return f"no environment {wanted.env_key!r}; run {run_id} has: {', '.join(known)}"
    group = db.execute("SELECT 1 FROM groups WHERE group_id = ?", (wanted.group_id,)).fetchone()
    if wanted.group_id is not None and not group:
        return f"no group {wanted.group_id!r}; groups have ids like g000012r0"
    return f"none of the {received} attempts of run {run_id} matches"
