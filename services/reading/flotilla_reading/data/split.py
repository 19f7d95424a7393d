"""Which tasks are evaluated on, and how many of an environment are trained on. Pure.

All choices take the first tasks of one order, that of a hash of their keys: not of the file, nor of
what else is in it. So a choice of more keeps what a choice of fewer has taken."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from flotilla_reading.data.entries import DataError, Entry


@dataclass(frozen=True, slots=True)
class SplitRules:
    """How many tasks of each environment are evaluated on: `ratio` of them, at most `most`; none if
    that is less than `least`, whose figures would say little. `held_out` environments are not
    trained on at all. `max_eval` limits the sum."""

    ratio: Fraction = Fraction(1, 10)
    least: int = 5
    most: int = 20
    max_eval: int | None = None
    held_out: tuple[str, ...] = ()

    def count_for(self, tasks: int) -> int:
        """Return how many of an environment's tasks are evaluated on; more tasks never mean
        fewer."""
        wanted = min(int(tasks * self.ratio), self.most)
        return wanted if wanted >= self.least else 0


@dataclass(frozen=True, slots=True)
class KeptSplit:
    """An earlier split, of the manifest at `path`: the part of each task by its key, and by its
    question, for tasks that have another key now."""

    path: str
    sha256: str
    by_key: Mapping[str, str]
    by_question: Mapping[str, str]

    def part_of(self, entry: Entry) -> str:
        """Return the part that a task was in, "train" or "eval"; "" if it is new."""
        part = self.by_key.get(entry.key) or self.by_question.get(entry.question)
        return part or ""


def order_of(key: str) -> bytes:
    """Return the place of a task in the order of all tasks.

    MD5, as in Fleet's own `prepare_dataset`: of the same data, the same tasks come first."""
    return hashlib.md5(key.encode(), usedforsecurity=False).digest()


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (order_of(entry.key), entry.key))


def count_eval_tasks(
    sizes: Mapping[str, int], rules: SplitRules, kept: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the number of tasks of each environment that are evaluated on; it is at least the
    number of those that are `kept`.

    If their sum exceeds `max_eval`, environments take turns in order of name, as long as they have
    any, so that small ones keep theirs."""
    wanted = {
        env: size if env in rules.held_out else rules.count_for(size) for env, size in sizes.items()
    }
    kept = kept or {}
    wanted = {env: max(count, kept.get(env, 0)) for env, count in wanted.items()}
    if rules.max_eval is None or sum(wanted.values()) <= rules.max_eval:
        return wanted
    open_places = rules.max_eval - sum(kept.values())
    if open_places < 0:
        raise DataError(
            f"--max-eval {rules.max_eval}: the split to keep evaluates on {sum(kept.values())} of"
            " these tasks; raise it"
        )
    turns = [
        env
        for turn in range(max(wanted.values()))
        for env in sorted(wanted)
        if kept.get(env, 0) <= turn < wanted[env]
    ]
    taken = Counter(turns[:open_places])
    return {env: kept.get(env, 0) + taken[env] for env in wanted}


def find_cap(sizes: Mapping[str, int], share: Fraction) -> int:
    """Return how many tasks of an environment may be trained on, so that none has more than `share`
    of all that are then left. It is the largest such number, and leaves the most tasks.

    Raises DataError if there are too few environments for that."""
    counts = sorted(size for size in sizes.values() if size)
    if not counts:
        return 0
    if share * len(counts) < 1:
        raise DataError(
            f"--max-env-share {float(share):g}: of {len(counts)} environments to train on, one has"
            f" at least {Fraction(1, len(counts))} of the tasks; raise it, or leave it out"
        )

    def fits(cap: int) -> bool:
        return cap <= share * sum(min(size, cap) for size in counts)

    # What fits does so up to some number: the sum grows by less and less as the cap is raised.
    fitting, beyond = 0, counts[-1] + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting
