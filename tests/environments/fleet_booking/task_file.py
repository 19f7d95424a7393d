"""The user's own file of Fleet's booking tasks, and the scripted solutions by task."""

import os
from pathlib import Path
from typing import Any

import pytest

from flotilla_environments.api import Instance, open_instance
from flotilla_environments.fleet_booking.__main__ import for_this_app, is_fleets
from flotilla_environments.tasks import load_tasks
from tests.environments.fleet_booking.solutions.cards import SOLUTIONS as NEW_CARD
from tests.environments.fleet_booking.solutions.far_stays import SOLUTIONS as FAR_STAYS
from tests.environments.fleet_booking.solutions.lists import SOLUTIONS as LISTS
from tests.environments.fleet_booking.solutions.stays import SOLUTIONS as STAYS

VARIABLE = "FLOTILLA_FLEET_BOOKING_TASKS"
PATH = os.environ.get(VARIABLE, "")
MISSING = (
    f"set {VARIABLE} to the path of Fleet's booking tasks (JSON) to run these tests"
    f"{PATH and f'; there is no file {PATH}'}"
)
SOLUTIONS = {**LISTS, **STAYS, **FAR_STAYS, **NEW_CARD}
# Tasks that no tool calls can solve; docs/fleet_booking.md explains why.
OTHER_USER = {"i7ipqa9jhuo", "h4wlcef57y9v"}
DRAWN_REFERENCE = {"yus7clba4foq", "akyxlzgkg6ex"}
# Its verifier passes a hotel without the pool that the prompt demands.
OVERLOOKED = {"it6ouuspr7ww"}

Task = dict[str, Any]


def short_id(task: Task) -> str:
    return task["key"].split("_")[1]


def read_tasks() -> list[Task]:
    if not PATH or not Path(PATH).is_file():
        return []
    return [for_this_app(task) for task in load_tasks(Path(PATH)) if is_fleets(task)]


TASKS = {short_id(task): task for task in read_tasks()}
needs_tasks = pytest.mark.skipif(not TASKS, reason=MISSING)


def open_task(task: Task) -> Instance:
    return open_instance(task["env_id"], task["data_id"], task["data_version"])
