"""JSON in columns of the journal, for those who only look at a run.

The learner compares its tables with sums when it starts. Who reads a journal at another time may
meet one that was changed by hand, or that a disk has damaged."""

import json
from typing import Any, TypeVar

import msgspec

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError

T = TypeVar("T")


class DamagedColumnError(JournalError):
    """A column does not hold what the learner writes there; the message names it."""


class GroupTask(msgspec.Struct, frozen=True):
    """What a group's column `spec` says of its task: key, environment and JSON; and the group's
    size."""

    task: tuple[str, str, str]
    size: int

    @property
    def task_key(self) -> str:
        return self.task[0]

    @property
    def env_key(self) -> str:
        return self.task[1]

    def find_prompt(self, group_id: str) -> str:
        """Return the task's prompt, "" if it has none. Raises DamagedColumnError."""
        where = f"the task of group {group_id}"
        return str(decode_column(self.task[2], dict[str, Any], where).get("prompt", ""))


def group_task(group_id: str, spec: Any) -> GroupTask:
    """Return the task of a group from its column `spec`. Raises DamagedColumnError."""
    return decode_column(spec, GroupTask, f"the spec of group {group_id}")


def decode_column(text: Any, kind: type[T], where: str) -> T:
    """Return the JSON of a column as a type of msgspec's; `where` names the column in the message.
    Raises DamagedColumnError."""
    try:
        # Not msgspec's parser, which takes no NaN: that of the journal's writer does.
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedColumnError(
            f"{JOURNAL_FILE} is damaged: {where}: {error}. Put back a copy from before the damage,"
            " or resume the run, which finds all that is damaged and says what can be saved"
        ) from error
