"""Task files in Fleet's JSON format, generated from data ids.

    flotilla tasks --split train --count 1200 --out train.json

A task file is {"tasks": [...]}. Two vocabularies of field names are in use for the same thing, the
SDK's (`key`, `env_id`, `version`, `data_id`, `verifier_func`) and the data set's (`task_key`,
`env_key`, `env_version`, `data_key`, `verifier_code`); both are read, the SDK's is written.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import (
    ALL_APPS,
    APPS,
    DATA_VERSION,
    SPLITS,
    Split,
    draw_scenario,
    make_data_id,
)

VERSION = "v1"
_ALIASES = {
    "task_key": "key",
    "env_key": "env_id",
    "env_version": "version",
    "data_key": "data_id",
    "verifier_code": "verifier_func",
}
_REQUIRED = ("key", "prompt", "env_id")


class TaskError(ValueError):
    """A task or task file that cannot be used; the message names the task and the field."""


@cache
def verifier_source(env_key: str, kind: str) -> str:
    """Source text of the verifier for a kind of task."""
    path = Path(__file__).parent / env_key / "verifiers" / f"{kind}.py"
    return path.read_text(encoding="utf-8")


def make_task(
    env_key: str, split: Split, index: int, data_version: str = DATA_VERSION
) -> dict[str, Any]:
    """Make the task `index` of a split. Raises `ValueError` for an unknown one."""
    of = draw_scenario(env_key, make_data_id(split, index), data_version)
    version = "" if data_version == DATA_VERSION else f"-{data_version}"
    return {
        "key": f"{env_key}-{of.data_id}{version}",
        "prompt": of.prompt,
        "env_id": env_key,
        "version": VERSION,
        "data_id": of.data_id,
        "data_version": of.data_version,
        "verifier_func": verifier_source(env_key, of.kind),
        "task_modality": ALL_APPS[env_key].modality,
        "env_variables": of.variables,
    }


def make_solution(task: Mapping[str, Any]) -> dict[str, Any]:
    """Make the recorded solution of a generated task, as `flotilla data check` reads it."""
    calls = [{"name": name, "arguments": arguments} for name, arguments in plan_calls(task)]
    return {
        "key": task["key"],
        "calls": calls,
        "answer": "done",
    }


def make_tasks(
    env_keys: Sequence[str],
    split: Split,
    count: int,
    start: int = 0,
    data_version: str = DATA_VERSION,
) -> Iterator[dict[str, Any]]:
    """Make `count` tasks, the environments taking turns."""
    for position in range(start, start + count):
        index, turn = divmod(position, len(env_keys))
        yield make_task(env_keys[turn], split, index, data_version)


def normalize_task(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task in the SDK's vocabulary.

    If a field occurs under both names, the SDK's wins, as in Fleet's loaders. A JSON-encoded
    `env_variables` is decoded, an absent one is {}. Raises `TaskError`."""
    task = {_ALIASES.get(name, name): value for name, value in raw.items() if name in _ALIASES}
    task |= {name: value for name, value in raw.items() if name not in _ALIASES}
    for name in _REQUIRED:
        if not isinstance(task.get(name), str) or not task[name].strip():
            other = next((alias for alias, to in _ALIASES.items() if to == name), name)
            names = name if other == name else f"{name} (or {other})"
            raise TaskError(f"task {task.get('key', '?')}: {names} must be a non-empty string")
    task["env_variables"] = _parse_variables(task["key"], task.get("env_variables"))
    task.setdefault("task_modality", "tool_use")
    return task


def _parse_variables(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise TaskError(f"task {key}: env_variables is not JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TaskError(f"task {key}: env_variables must be an object")
    return cast(dict[str, Any], value)


def _require_object(path: Path, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise TaskError(f"{path}: {entry!r:.80} is not a task: expected an object")
    return cast(dict[str, Any], entry)


def load_tasks(path: Path) -> list[dict[str, Any]]:
    """Read a task file, {"tasks": [...]} or a bare array. Raises `TaskError` for a bad one."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TaskError(f"{path} is not JSON: {error}") from error
    entries: Any = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise TaskError(f'{path}: expected {{"tasks": [...]}} or an array of tasks')
    tasks = [normalize_task(_require_object(path, entry)) for entry in cast(list[Any], entries)]
    seen: set[str] = set()
    for task in tasks:
        if task["key"] in seen:
            raise TaskError(f"{path}: task {task['key']} occurs twice")
        seen.add(task["key"])
    return tasks


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flotilla tasks",
        description="Write a file of generated tasks in Fleet's JSON format.",
        epilog="Task N of a split is always the same task, so --start gives fresh ones. Splits: "
        "train is for RL; heldout has pairs of names that are in no train or demo task; "
        "unseen_names has such pairs made of names that RL never trains on; demo is for "
        "demonstrations and uses every name.",
    )
    parser.add_argument("--split", choices=list(SPLITS), required=True)
    parser.add_argument("--count", type=int, required=True, help="tasks in all")
    parser.add_argument("--start", type=int, default=0, help="skip this many tasks (default 0)")
    parser.add_argument(
        "--env",
        action="append",
        choices=list(ALL_APPS),
        help="environment to take tasks from; may be repeated (default: "
        f"{', '.join(APPS)}, taking turns)",
    )
    parser.add_argument(
        "--data-version",
        default=DATA_VERSION,
        help="version of the data (default %(default)s); mixed_up, of screen: the control whose "
        "pictures show other tiles than those that can be clicked",
    )
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument(
        "--solutions", type=Path, help="file to write with the calls that solve each task"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.count < 1 or options.start < 0:
        parser.error("--count must be at least 1 and --start at least 0")
    env_keys = options.env or list(APPS)
    try:
        tasks = list(
            make_tasks(env_keys, options.split, options.count, options.start, options.data_version)
        )
    except ValueError as error:
        parser.error(str(error))
    if options.solutions is not None:
        options.solutions.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(make_solution(task)) + "\n" for task in tasks]
        options.solutions.write_text("".join(lines), encoding="utf-8")
    text = json.dumps({"tasks": tasks}, indent=1) + "\n"
    if options.out is None:
        sys.stdout.write(text)
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(tasks)} tasks of split {options.split}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
