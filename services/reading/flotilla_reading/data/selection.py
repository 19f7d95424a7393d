"""Choice of a source's tasks by modality, environment and difficulty, and of some of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.spec.config import did_you_mean
from flotilla_reading.data.entries import DataError, Entry, Reason
from flotilla_reading.data.split import in_order


@dataclass(frozen=True, slots=True)
class Selection:
    """The tasks that are wanted; an empty field wants all."""

    modality: str = ""
    envs: tuple[str, ...] = ()
    difficulty: tuple[str, ...] = ()
    max_tasks: int | None = None

    def find_reason(self, entry: Entry) -> tuple[Reason, str] | None:
        """Return why a task is not wanted, and what it is instead; None if it is wanted."""
        difficulty = entry.fields.get("difficulty")
        for wanted, reason, value in (
            ((self.modality,) * bool(self.modality), Reason.OTHER_MODALITY, entry.task.modality),
            (self.envs, Reason.OTHER_ENV, entry.env_key),
            (self.difficulty, Reason.OTHER_DIFFICULTY, "" if difficulty is None else difficulty),
        ):
            if wanted and str(value) not in wanted:
                return reason, str(value) or "none"
        return None

    def cut(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return `max_tasks` of the tasks, the first by `split.order_of`, and the others."""
        ordered = in_order(entries)
        most = len(ordered) if self.max_tasks is None else self.max_tasks
        return ordered[:most], ordered[most:]


def check_names(option: str, names: Sequence[str], entries: Sequence[Entry]) -> None:
    """Raise DataError if one of the names is no environment of the tasks."""
    known = sorted({entry.env_key for entry in entries})
    for name in names:
        if name not in known:
            raise DataError(
                f"{option}: the source has no environment {name!r}{did_you_mean(name, known)};"
                f" it has {', '.join(known[:12]) or 'none'}"
                + (f" and {len(known) - 12} others" if len(known) > 12 else "")
            )
