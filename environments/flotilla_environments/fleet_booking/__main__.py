"""Make a file of Fleet's booking tasks usable with this app.

    flotilla fleet-booking tasks FLEET_TASKS.json --out tasks.json

Fleet calls its site "booking", which is the name of another, smaller app here. The new file has the
same tasks, in the same order and with the same prompts and verifiers, with the environment named
fleet_booking; if a task does not set them, it also gets this site's day and user as variables.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_environments.fleet_booking.app import KEY
from flotilla_environments.fleet_booking.clock import TODAY
from flotilla_environments.fleet_booking.seed.database import DATA_IDS
from flotilla_environments.tasks import VERSION, TaskError, load_tasks

FLEETS_NAME = "booking"
VARIABLES = {
    "CURRENT_DATE": TODAY.isoformat(),
    "LOGGED_IN_USER": "charles.moore@synapse.com",
    "LOGGED_IN_NAME": "Charles Moore",
}


def is_fleets(task: Mapping[str, Any]) -> bool:
    """Return True for a task of Fleet's booking site with data that this app has."""
    return task["env_id"] in (FLEETS_NAME, KEY) and task.get("data_id") in DATA_IDS


def for_this_app(task: Mapping[str, Any]) -> dict[str, Any]:
    variables = {**VARIABLES, **task["env_variables"]}
    return {**task, "env_id": KEY, "version": VERSION, "env_variables": variables}


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flotilla fleet-booking",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="rewrite a task file")
    tasks.add_argument("file", type=Path, help="Fleet's tasks: an array, or {'tasks': [...]}")
    tasks.add_argument("--out", type=Path, required=True, help="file to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _build_parser().parse_args(argv)
    try:
        tasks = load_tasks(options.file)
    except (OSError, TaskError) as error:
        print(f"flotilla fleet-booking: {error}", file=sys.stderr)
        return 1
    ours = [for_this_app(task) for task in tasks if is_fleets(task)]
    if not ours:
        known = ", ".join(DATA_IDS)
        print(
            f"{options.file} has no task with env_id {FLEETS_NAME} and data_id {known}",
            file=sys.stderr,
        )
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"tasks": ours}, indent=1) + "\n", encoding="utf-8")
    left_out = f", {len(tasks) - len(ours)} of other environments or data left out"
    print(
        f"{options.out}: {len(ours)} tasks" + (left_out if len(ours) < len(tasks) else ""),
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
