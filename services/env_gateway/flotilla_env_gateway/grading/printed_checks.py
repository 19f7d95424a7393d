"""Checks that a verifier printed in Fleet's formats: shown to people, and worth no reward. Pure.

Printed text may be the policy's, so that only checks which a verifier returns can earn any."""

import re
from collections.abc import Sequence
from typing import cast

from flotilla_common.text.parsing import TextLimits, parse_literal
from flotilla_env_gateway.ports import CheckReport
from flotilla_env_gateway.verify.check_report import bounded_checks

_APP = re.compile(r"^(?P<name>App \S.*?): (?P<passed>[01])[ \t\r]*$", re.MULTILINE)
# A verifier that prints results in either format, by its source.
_PRINTS = re.compile(r"(ERROR|SUCCESS)_ACCUMULATOR >>>|[\"']App [\"'{%]")
# Only this much, from the end of the output, is read.
_READ_CHARS = 2**19
# A longer list is read line by line: Python takes milliseconds for each KiB.
_LIST_LIMITS = TextLimits(bytes=2**15, values=4096)


def prints_checks(source: str) -> bool:
    return _PRINTS.search(source) is not None


def read_printed_checks(stdout: str) -> CheckReport:
    """Read the last results of each app, `App NAME: 0` or `App NAME: 1`, or without any the last
    lists of passed and failed checks."""
    end = stdout[-_READ_CHARS:]
    apps = {line["name"]: line["passed"] == "1" for line in _APP.finditer(end)}
    if apps:
        passed = [name for name, value in apps.items() if value]
        failed = [name for name, value in apps.items() if not value]
        return CheckReport(bounded_checks(passed), bounded_checks(failed))
    return CheckReport(_read_list(end, "SUCCESS"), _read_list(end, "ERROR"))


def _read_list(stdout: str, kind: str) -> tuple[str, ...]:
    before, closed, _ = stdout.rpartition(f"\n<<< {kind}_ACCUMULATOR <<<")
    _, opened, body = before.rpartition(f">>> {kind}_ACCUMULATOR >>>\n")
    if not (closed and opened):
        return ()
    try:
        value = parse_literal(body.strip(), _LIST_LIMITS)
        is_list = isinstance(value, list | tuple)
        return bounded_checks(cast("Sequence[object]", value) if is_list else [value])
    except ValueError:
        # Not a literal, or one with an integer that Python does not write out.
        return bounded_checks(body.splitlines())
