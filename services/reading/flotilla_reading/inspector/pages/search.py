"""The page that searches a run's attempts."""

import math
from collections.abc import Mapping

from flotilla_common.domain.attempts import FailureKind, StopReason
from flotilla_reading.analysis.failure_classes import OTHER, RULES
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.inspector.pages.links import Links
from flotilla_reading.inspector.pages.page import Crumb, Page
from flotilla_reading.inspector.queries.attempt_search import (
    AttemptSearch,
    newest_environments,
    search_attempts,
)
from flotilla_reading.inspector.queries.run_folders import NotFoundError, read_journal
from flotilla_reading.inspector.queries.run_library import RunLibrary

FIELDS = ("env", "outcome", "min", "max", "ended", "class", "errors", "text")
# By the name in addresses: whether it passed, and whether it is graded.
_OUTCOMES = {
    "": (None, None),
    "passed": (True, None),
    "failed": (False, True),
    "ungraded": (None, False),
}


def search_page(
    library: RunLibrary, links: Links, run_id: str, query: Mapping[str, str], before: int | None
) -> Page:
    """Show the attempts that match a query, whose fields are `FIELDS`. Raises NotFoundError."""
    run = library.open(run_id)
    given = {name: query[name] for name in FIELDS if query.get(name)}
    search = _read_search(given, before)
    with read_journal(run.folder) as db:
        # The first use of the shelf loads the tokenizer.
        found = search_attempts(db, search, lambda db, key: run.shelf.read_row(db, key))
        environments = newest_environments(db)
    window = found.looked_at
    values = {
        "run": run_id,
        "given": dict.fromkeys(FIELDS, "") | given,
        "found": found,
        "environments": environments,
        "ends": [*StopReason, *FailureKind],
        "classes": [*(rule.name for rule in RULES), OTHER],
        "older": links.search(run_id, {**given, "before": f"{window.before}"})
        if window.before
        else "",
        "crumbs": (Crumb(run_id, links.run(run_id)),),
    }
    return Page("search.html", f"Attempts of {run_id}", values)


def _read_search(given: Mapping[str, str], before: int | None) -> AttemptSearch:
    outcome = given.get("outcome", "")
    if outcome not in _OUTCOMES:
        raise NotFoundError(f"outcome is one of {', '.join(_OUTCOMES)[2:]}, not {outcome!r}.")
    passed, graded = _OUTCOMES[outcome]
    wanted = AttemptFilter(
        env_key=given.get("env"),
        passed=passed,
        graded=graded,
        least_reward=_read_reward(given, "min"),
        most_reward=_read_reward(given, "max"),
        ended=given.get("ended"),
        tool_errors=True if "errors" in given else None,
    )
    return AttemptSearch(wanted, given.get("text", ""), given.get("class", ""), before)


def _read_reward(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name)
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise NotFoundError(f"{name} is a reward such as 0.5, not {text!r}.")
    return value
