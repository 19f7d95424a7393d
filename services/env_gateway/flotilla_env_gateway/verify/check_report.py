"""Checks and named rewards of a verifier, from the value that it returned. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from flotilla_common.domain.attempts import MAX_REWARD, MOST_NAMED_REWARDS, REWARD_NAME
from flotilla_env_gateway.ports import CheckReport

CHECKS_KEPT = 200
# 200 passed and 200 failed checks of any characters fit into one message.
CHECK_CHARS = 500


class Returned(NamedTuple):
    """What a verifier returned; `rewards` are not checked yet."""

    score: object
    report: CheckReport | None = None
    rewards: object = None


def split_report(value: object) -> Returned:
    """Split the value that a verifier returned into its score and, if given, checks and named
    rewards: `{"score": 0, "passed": ["one"], "failed": ["another"], "rewards": {"style": 0.5}}`."""
    match value:
        case {"score": score, "passed": list() | tuple(), "failed": list() | tuple()}:
            fields = cast("dict[str, Any]", value)
            report = CheckReport(bounded_checks(fields["passed"]), bounded_checks(fields["failed"]))
            return Returned(score, report, fields.get("rewards"))
        case {"score": score}:
            return Returned(score, None, cast("dict[str, Any]", value).get("rewards"))
        case _:
            return Returned(value)


def read_named_rewards(rewards: object) -> dict[str, float]:
    """Return the named rewards without those that are None, which are unknown.

    Raises ValueError or TypeError that says what they must be."""
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        raise TypeError('"rewards" are an object of numbers by name')
    named = cast("Mapping[Any, Any]", rewards)
    if len(named) > MOST_NAMED_REWARDS:
        raise ValueError(f'"rewards" are at most {MOST_NAMED_REWARDS}; got {len(named)}')
    for name, value in named.items():
        if not isinstance(name, str) or not re.fullmatch(REWARD_NAME, name):
            shown = repr(name)[:100]
            raise ValueError(f'"rewards": {shown} is no name of 1 to 64 of A-Z a-z 0-9 _ . -')
        if value is not None and not is_reward(value):
            shown = repr(value)[:100]
            raise ValueError(
                f'"rewards": {name!r} is {shown}; expected a number from {-MAX_REWARD:g} to'
                f" {MAX_REWARD:g}, or None if it is unknown"
            )
    return {name: float(value) for name, value in named.items() if value is not None}


def is_reward(value: object) -> bool:
    """Return True for a number within the bounds of rewards."""
    # An int may exceed any float; NaN is within no bounds.
    return isinstance(value, bool | int | float) and -MAX_REWARD <= value <= MAX_REWARD


def bounded_checks(items: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(item)[:CHECK_CHARS] for item in items[:CHECKS_KEPT])
