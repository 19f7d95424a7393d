"""Checks of a verifier, from the value that it returned, within bounds. Pure."""

from collections.abc import Sequence
from typing import cast

from services.env_gateway.ports import CheckReport

CHECKS_KEPT = 200
# 200 passed and 200 failed checks of any characters fit into one message.
CHECK_CHARS = 500


def split_report(value: object) -> tuple[object, CheckReport | None]:
    """Split the value that a verifier returned into its score and, if given, its checks:
    `{"score": 0, "passed": ["one"], "failed": ["another"]}`."""
    match value:
        case {"score": score, "passed": list() | tuple(), "failed": list() | tuple()}:
            fields = cast("dict[str, list[object]]", value)
            return score, CheckReport(
                bounded_checks(fields["passed"]), bounded_checks(fields["failed"])
            )
        case {"score": score}:
            return score, None
        case _:
            return value, None


def bounded_checks(items: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(item)[:CHECK_CHARS] for item in items[:CHECKS_KEPT])
