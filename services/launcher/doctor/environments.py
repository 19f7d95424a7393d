"""Environments that tasks name and nobody else. Most servers take any name, so that a slip of the
pen becomes an environment of its own. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from services.launcher.doctor.findings import Finding, warn

# Tasks of an environment for one of another that is written almost the same: that one is a slip.
_RARE = 10
_CLOSE = 0.8
# Backends that take any name; the others say themselves what they do not have.
_ANY = ("mcp", "openenv")
_DIGITS = re.compile(r"\d+")


def misnamed(section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]) -> list[Finding]:
    """`section` is the gateway's, and `tasks` are those that the run uses: each its key, and its
    environment."""
    if section["backend"] not in _ANY:
        return []
    return [*_of_tasks(section, tasks), *_of_spec(section, tasks)]


def _of_tasks(section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    counts = Counter(env_key for _, env_key in tasks)
    for env_key in sorted(counts):
        if (why := _doubt(env_key, counts, section)) is None:
            continue
        own = [key for key, named in tasks if named == env_key]
        count = f"task {own[0]!r} is" if len(own) == 1 else f"{len(own)} tasks, as {own[0]!r}, are"
        fix = f"correct env_id, or add [env_gateway.environments.{env_key}]"
        yield warn(f"{count} of environment {env_key!r}, {why}", fix)


def _doubt(env_key: str, counts: Counter[str], section: Mapping[str, Any]) -> str | None:
    """Why an environment may be none; None where nothing speaks for that."""
    declared = section["environments"]
    if env_key in declared:
        return None
    others = [name for name in declared if _backend(section, name) == section["backend"]]
    if others:
        close = _close(env_key, {*others, *counts})
        return f"which [env_gateway.environments] does not name{_meant(close)}"
    often = [name for name, count in counts.items() if count >= _RARE * counts[env_key]]
    close = _close(env_key, often)
    return f"and no other{_meant(close)}" if close else None


def _of_spec(section: Mapping[str, Any], tasks: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    used = {env_key for _, env_key in tasks}
    for env_key in sorted(set(section["environments"]) - used):
        if close := _close(env_key, used - set(section["environments"])):
            where = f"env_gateway.environments.{env_key}"
            yield warn(f"no task is of environment {env_key!r}{_meant(close)}", f"correct {where}")


def _backend(section: Mapping[str, Any], env_key: str) -> str:
    return section["environments"][env_key]["backend"] or section["backend"]


def _close(env_key: str, names: Collection[str]) -> str:
    """The other name that is almost the same; those that differ in a number are different."""
    bare = _DIGITS.sub("0", env_key)
    others = [name for name in names if name != env_key and _DIGITS.sub("0", name) != bare]
    return next(iter(get_close_matches(env_key, others, 1, _CLOSE)), "")


def _meant(close: str) -> str:
    return f" (did you mean {close!r}?)" if close else ""
