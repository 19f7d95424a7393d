"""Results of task checks: JSON lines, one per task. `flotilla data check` writes them, and a
learner trains on the tasks that they call valid.

Of several lines of one task the last counts. A last line that was cut off is skipped."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec


class CheckFileError(ValueError):
    """A file of results cannot be read; the message names the file, the line and the fix."""


class Outcome(StrEnum):
    """What a check found. An `error` is the environment's, and says nothing about the task."""

    VALID = "valid"
    INVALID = "invalid"
    UNCHECKED = "unchecked"
    ERROR = "error"
    TIMEOUT = "timeout"


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check: what was done and found. `rewards` are those of its grades, None
    where there was none, and `printed` is an excerpt of the verifier's output. It is `provisional`
    if the spec may be at fault in place of the task."""

    outcome: Outcome
    detail: str
    rewards: tuple[float | None, ...] = ()
    printed: str = ""
    provisional: bool = False


class TaskCheck(msgspec.Struct, frozen=True):
    """The results of a task by check. They are those of the task with this `digest`, solved by the
    solution with the digest `solution` ("" without one), by this version of the `checker`."""

    key: str
    env_key: str
    digest: str
    solution: str
    checker: int
    verdict: Outcome
    checks: Mapping[str, CheckResult]
    seconds: float

    @property
    def is_final(self) -> bool:
        """False if another try may find out more."""
        known = self.verdict in (Outcome.VALID, Outcome.INVALID)
        return known and not any(result.provisional for result in self.checks.values())


def read_checks(path: Path) -> dict[str, TaskCheck]:
    """Return the results of a file by the keys of their tasks. Raises CheckFileError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckFileError(f"{path}: {error.strerror}") from error
    # After the last line feed is nothing, or a line that was cut off.
    found: dict[str, TaskCheck] = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            check = msgspec.json.decode(line, type=TaskCheck)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CheckFileError(
                f"{path}: line {number}: {error}; is it a file of `flotilla data check`?"
            ) from error
        found[check.key] = check
    return found


def format_check(check: TaskCheck) -> bytes:
    return msgspec.json.encode(check) + b"\n"
