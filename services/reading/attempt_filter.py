"""Choice of a run's attempts in its journal."""

import sqlite3
from dataclasses import dataclass
from typing import Any

from services.common.domain.pass_rates import PASS_REWARD


@dataclass(frozen=True, slots=True)
class AttemptFilter:
    """Filter of attempts; None matches all. `passed` means a reward of at least 1, False
    everything else, including tries without a reward."""

    step: int | None = None
    env_key: str | None = None
    group_id: str | None = None
    passed: bool | None = None

    def to_sql(self) -> tuple[str, tuple[Any, ...]]:
        """Return an SQL condition on `trajectories t` and `groups g`, and its arguments."""
        conditions: list[tuple[str, Any]] = []
        if self.step is not None:
            conditions.append(("g.step = ?", self.step))
        if self.env_key is not None:
            conditions.append(("json_extract(g.spec, '$.task[1]') = ?", self.env_key))
        if self.group_id is not None:
            conditions.append(("g.group_id = ?", self.group_id))
        if self.passed is not None:
            sign = "=" if self.passed else "!="
            conditions.append((f"(coalesce(t.reward, -1) >= ?) {sign} 1", PASS_REWARD))
        text = " AND ".join(condition for condition, _ in conditions) or "1"
        return text, tuple(value for _, value in conditions)


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
