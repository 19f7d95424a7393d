"""Issues of one repository, each with its own label."""

import random
import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import App, Call, DrawnTask, Row, TaskKind
from flotilla_environments.name_lists import Names
from flotilla_environments.toolkit import ToolError, define_tool, tools_by_name

SCHEMA = """
create table issues(id integer primary key, repo text not null, label text not null,
  status text not null, assignee text not null);
"""
_ROWS = 3


def find_issues(
    db: sqlite3.Connection,
    repo: Annotated[str, "name of the repository"],
    label: Annotated[str, "label of the issue"],
) -> list[Row]:
    """Find the issues of a repository that carry a label."""
    rows = db.execute(
        "select id, label, status from issues where repo = ? and label = ?", (repo, label)
    ).fetchall()
    if not rows:
        raise ToolError("not found")
    return [{"id": row[0], "label": row[1], "status": row[2]} for row in rows]


def close_issue(
    db: sqlite3.Connection, issue_id: Annotated[int, "id of the issue"]
) -> dict[str, Any]:
    """Close an issue."""
    if db.execute("update issues set status = 'closed' where id = ?", (issue_id,)).rowcount == 0:
        raise ToolError("not found")
    return {"ok": True}


def assign_issue(
    db: sqlite3.Connection,
    issue_id: Annotated[int, "id of the issue"],
    user: Annotated[str, "name of the new assignee"],
) -> dict[str, Any]:
    """Assign an issue to a user."""
    changed = db.execute("update issues set assignee = ? where id = ?", (user, issue_id))
    if changed.rowcount == 0:
        raise ToolError("not found")
    return {"ok": True}


def _draw_tracker_task(names: Names, kind: str, rng: random.Random) -> DrawnTask:
    repo, label = names.draw_pair("repo", "label")
    labels = [label, *names.draw_some("label", _ROWS - 1, avoid=label)]
    issues: list[Row] = [
        {"id": issue_id, "repo": repo, "label": name, "status": "open", "assignee": ""}
        for issue_id, name in zip(names.draw_ids(_ROWS), labels, strict=True)
    ]
    slots: dict[str, str | int] = {"repo": repo, "label": label}
    if kind != "close":
        slots["user"] = names.draw_one("first")
    return DrawnTask(slots, {"issue_id": issues[0]["id"]}, (repo, label), {"issues": issues})


def _find_call(task: DrawnTask) -> Call:
    return "find_issues", {"repo": task.slots["repo"], "label": task.slots["label"]}


def _assign_call(task: DrawnTask) -> Call:
    return "assign_issue", {"issue_id": task.targets["issue_id"], "user": task.slots["user"]}


def _close_call(task: DrawnTask) -> Call:
    return "close_issue", {"issue_id": task.targets["issue_id"]}


TRACKER = App(
    key="tracker",
    schema=SCHEMA,
    tools=tools_by_name(
        define_tool(find_issues, read_only=True, idempotent=True),
        define_tool(close_issue, read_only=False, idempotent=True),
        define_tool(assign_issue, read_only=False, idempotent=True),
    ),
    kinds={
        "close": TaskKind(
            (
                "Close the {label} issue in {repo}.",
                "The {label} issue in the {repo} repo is fixed, close it.",
            ),
            lambda task: [_find_call(task), _close_call(task)],
        ),
        "assign": TaskKind(
            (
                "Assign the {label} issue in {repo} to {user}.",
                "{user} should handle the {label} issue in {repo}.",
            ),
            lambda task: [_find_call(task), _assign_call(task)],
        ),
        "both": TaskKind(
            (
                "Assign the {label} issue in {repo} to {user} and close it.",
                "{user} fixed the {label} issue in {repo}, assign and close it.",
            ),
            lambda task: [_find_call(task), _assign_call(task), _close_call(task)],
        ),
    },
    draw=_draw_tracker_task,
)
