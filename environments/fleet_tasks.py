"""Task files made from Fleet's tasks for an account.

    FLEET_API_KEY=... python -m environments.fleet_tasks --train train.json --heldout heldout.json

Training and held-out tasks are split by hashes of their keys, per environment: a task that Fleet
adds later moves at most one other task to the other side.
"""

import argparse
import hashlib
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

KEY_VARIABLE = "FLEET_API_KEY"
# Fleet's SDK reads the same one.
URL_VARIABLE = "FLEET_BASE_URL"
URL = "https://orchestrator.fleetai.com"
_TIMEOUT_S = 300.0
_MOST_BYTES = 2**30
_SAME = ("key", "prompt", "version", "data_id", "data_version", "env_variables")
# Fields read from the metadata if the task itself lacks them.
_METADATA = ("task_modality", "difficulty")
# Fleet's answer in place of a verifier that it could not read.
_NO_CODE = "<error loading code:"
_HELDOUT_SHARE = 5


class FleetTasksError(Exception):
    """Fleet has no usable tasks; the message has the reason and the fix."""


def fetch_tasks(url: str, key: str, env_key: str | None = None) -> list[dict[str, Any]]:
    """Fetch the tasks of one environment, or all, as Fleet sends them. Raises FleetTasksError."""
    query = f"?{urllib.parse.urlencode({'env_key': env_key})}" if env_key else ""
    where = f"{url.rstrip('/')}/v1/tasks{query}"
    if not where.startswith(("http://", "https://")):
        raise FleetTasksError(f"{url!r} is no address: write http:// or https://")
    request = urllib.request.Request(where, headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content = json.loads(_check_size(answer.read(_MOST_BYTES + 1)))
    except urllib.error.HTTPError as error:
        hint = f"; check {KEY_VARIABLE}" if error.code in (401, 403) else ""
        with error:
            raise FleetTasksError(f"{where}: HTTP {error.code} {error.reason}{hint}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FleetTasksError(f"{where}: {error}") from error
    tasks: Any = content.get("tasks") if isinstance(content, dict) else None
    if not isinstance(tasks, list):
        raise FleetTasksError(f'{where}: expected an object with the list "tasks"')
    return cast(list[dict[str, Any]], tasks)


def _check_size(content: bytes) -> bytes:
    if len(content) > _MOST_BYTES:
        raise ValueError(
            f"more than {_MOST_BYTES} bytes; fetch one environment at a time, by --env"
        )
    return content


def as_task(given: dict[str, Any], modality: str) -> dict[str, Any] | None:
    """Convert to a task of a task file; return None for one that cannot be started or graded.

    `modality` applies to tasks that do not name one."""
    verifier: dict[str, Any] = given.get("verifier") or {}
    code = verifier.get("code") or given.get("verifier_func") or ""
    if not code.strip() or code.strip().startswith(_NO_CODE) or not given.get("prompt"):
        return None
    metadata: dict[str, Any] = given.get("metadata") or {}
    task = {name: given[name] for name in _SAME if given.get(name) is not None}
    task |= {
        name: value
        for name in _METADATA
        if (value := given.get(name) or metadata.get(name)) is not None
    }
    task.setdefault("task_modality", modality)
    return task | {"env_id": given.get("environment_id"), "verifier_func": code}


def split_tasks(
    tasks: Iterable[dict[str, Any]], per_env: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split into training and held-out tasks: of each environment the `per_env` with the lowest
    hashes are held out, but at most a fifth."""
    by_env: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for task in tasks:
        by_env[task["env_id"]].append(task)
    train: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    for env in sorted(by_env):
        own = sorted(by_env[env], key=lambda task: hashlib.sha256(task["key"].encode()).digest())
        count = min(per_env, len(own) // _HELDOUT_SHARE)
        heldout += own[:count]
        train += own[count:]
    return train, heldout


def _write_tasks(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tasks": tasks}, indent=1) + "\n", encoding="utf-8")
    counts = Counter(task["env_id"] for task in tasks)
    by_env = ", ".join(f"{env} {count}" for env, count in sorted(counts.items()))
    print(f"{path}: {len(tasks)} tasks ({by_env})", file=sys.stderr)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m environments.fleet_tasks",
        description="Write task files of the tasks that Fleet has for an account.",
        epilog=f"The API key is read from {KEY_VARIABLE}.",
    )
    parser.add_argument("--train", type=Path, required=True, help="file to write")
    parser.add_argument("--heldout", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--env", action="append", help="environment; may be repeated (default: all)"
    )
    parser.add_argument(
        "--modality",
        default="tool_use",
        help="for tasks that do not name one (default: %(default)s)",
    )
    parser.add_argument(
        "--heldout-per-env",
        type=int,
        default=20,
        metavar="N",
        help="at most (default: %(default)s)",
    )
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE, URL),
        help=f"default: {URL_VARIABLE}, or {URL}",
    )
    return parser


def _write_task_files(options: argparse.Namespace) -> None:
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise FleetTasksError(f"{KEY_VARIABLE} is not set: it holds the API key of the account")
    fetched = [task for env in options.env or [None] for task in fetch_tasks(options.url, key, env)]
    tasks = [task for each in fetched if (task := as_task(each, options.modality)) is not None]
    if len(tasks) < len(fetched):
        print(f"{len(fetched) - len(tasks)} tasks lack a verifier or a prompt", file=sys.stderr)
    train, heldout = split_tasks(tasks, options.heldout_per_env)
    if not train:
        of = f" of {', '.join(options.env)}" if options.env else ""
        raise FleetTasksError(f"{options.url} has no tasks{of} for this account")
    _write_tasks(options.heldout, heldout)
    # Written last, because a run's spec checks for this file.
    _write_tasks(options.train, train)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, 1 not."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.heldout_per_env < 1:
        parser.error("--heldout-per-env must be at least 1")
    try:
        _write_task_files(options)
    except FleetTasksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
