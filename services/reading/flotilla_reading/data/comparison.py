"""What two sets of tasks have in common, by key and digest. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flotilla_common.tasks.task_files import ReadTask


@dataclass(frozen=True, slots=True)
class Difference:
    """Keys of tasks that only the second set has, that only the first has, that both have and that
    are other tasks, and that are in another part: each with where it was and is."""

    added: Sequence[str]
    removed: Sequence[str]
    changed: Sequence[str]
    moved: Mapping[str, tuple[str, str]]
    unchanged: int


def compare(
    first: Mapping[str, Sequence[ReadTask]], second: Mapping[str, Sequence[ReadTask]]
) -> Difference:
    """Compare two sets, each by part. A part without a name, a whole file, is like any other."""
    before, after = _by_key(first), _by_key(second)
    both = [key for key in after if key in before]
    changed = [key for key in both if before[key][1] != after[key][1]]
    moved = {
        key: (before[key][0], after[key][0])
        for key in both
        if before[key][0] and after[key][0] and before[key][0] != after[key][0]
    }
    return Difference(
        [key for key in after if key not in before],
        [key for key in before if key not in after],
        changed,
        moved,
        sum(key not in moved and before[key][1] == after[key][1] for key in both),
    )


def _by_key(parts: Mapping[str, Sequence[ReadTask]]) -> dict[str, tuple[str, str]]:
    """Return part and digest of each task."""
    return {read.task.key: (part, read.digest) for part, tasks in parts.items() for read in tasks}
