"""Check for environment names that only a few tasks use. Most servers accept any name, so a
typo becomes an environment of its own. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from flotilla_launcher.doctor.findings import Finding, warn

# Tasks of an environment for one of another that is written almost the same: that one is a slip.
_RARE = 10
_CLOSE = 0.8
# Backends that accept any name; the others report unknown names themselves.
_LENIENT_BACKENDS = ("mcp", "openenv")
_DIGITS = re.compile(r"\d+")


def find_misnamed(section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]) -> list[Finding]:
    """Find likely typos in environment names. `section` is the gateway's; `tasks` are those
    that the run uses, each as its key and its environment."""
    if section["backend"] not in _LENIENT_BACKENDS:
        return []
    return [*_find_in_tasks(section, tasks), *_find_in_spec(section, tasks)]


def _find_in_tasks(
    section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    counts = Counter(env_key for _, env_key in tasks)
    for env_key in sorted(counts):
        if (why := _explain_doubt(env_key, counts, section)) is None:
            continue
        own = [key for key, named in tasks if named == env_key]
        count = f"task {own[0]!r} is" if len(own) == 1 else f"{len(own)} tasks, as {own[0]!r}, are"
        fix = f"correct env_id, or add [env_gateway.environments.{env_key}]"
        yield warn(f"{count} of environment {env_key!r}, {why}", fix)


def _explain_doubt(env_key: str, counts: Counter[str], section: Mapping[str, Any]) -> str | None:
    """Explain why an environment may not exist; None if nothing suggests that."""
    declared = section["environments"]
    if env_key in declared:
        return None
    others = [name for name in declared if _backend_of(section, name) == section["backend"]]
    if others:
        close = _closest_name(env_key, {*others, *counts})
        return f"which [env_gateway.environments] does not name{_format_suggestion(close)}"
    often = [name for name, count in counts.items() if count >= _RARE * counts[env_key]]
    close = _closest_name(env_key, often)
    return f"and no other{_format_suggestion(close)}" if close else None


def _find_in_spec(
    section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    used = {env_key for _, env_key in tasks}
    for env_key in sorted(set(section["environments"]) - used):
        if close := _closest_name(env_key, used - set(section["environments"])):
            where = f"env_gateway.environments.{env_key}"
            yield warn(
                f"no task is of environment {env_key!r}{_format_suggestion(close)}",
                f"correct {where}",
            )


def _backend_of(section: Mapping[str, Any], env_key: str) -> str:
    return section["environments"][env_key]["backend"] or section["backend"]


def _closest_name(env_key: str, names: Collection[str]) -> str:
    """Return another name that is almost the same; names that differ only in a number count as
    different."""
    bare = _DIGITS.sub("0", env_key)
    others = [name for name in names if name != env_key and _DIGITS.sub("0", name) != bare]
    return next(iter(get_close_matches(env_key, others, 1, _CLOSE)), "")


def _format_suggestion(close: str) -> str:
    return f" (did you mean {close!r}?)" if close else ""
