"""What the launcher knows of runs with `learner.objective = "sft"` or `[learner.warm_start]`: the
services that they need, and when. Pure."""

from collections.abc import Mapping
from typing import Any

from flotilla_launcher.state import LEARNER, SERVICES

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


def unused_at_first(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the services that a run has no use for while it imitates: all but the learner, unless
    the policy is evaluated before."""
    learner = tables.get(LEARNER)
    if not isinstance(learner, Mapping):
        return ()
    if not learner.get("warm_start") and learner.get("objective") != OBJECTIVE:
        return ()
    evaluation: Any = learner.get("eval")
    sets: Any = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    moments = [each.get("when", ["before"]) for each in sets or () if isinstance(each, Mapping)]
    if any("before" in each for each in moments):
        return ()
    return tuple(service for service in needed_services(tables) if service != LEARNER)
