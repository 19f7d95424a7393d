"""What the launcher knows of runs with `learner.objective = "sft"`: the services that they need.
Pure."""

from collections.abc import Mapping
from typing import Any

from services.launcher.state import LEARNER, SERVICES

OBJECTIVE = "sft"


def needed_services(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the services of a run: the learner alone if it imitates and evaluates nothing, since
    then no episode is played."""
    learner = tables.get(LEARNER)
    if not isinstance(learner, Mapping) or learner.get("objective") != OBJECTIVE:
        return SERVICES
    evaluation: Any = learner.get("eval")
    evaluates = isinstance(evaluation, Mapping) and bool(evaluation.get("sets"))
    return SERVICES if evaluates else (LEARNER,)
