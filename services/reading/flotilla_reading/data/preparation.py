"""Preparation of a source: each of its rows is trained on, evaluated on, or dropped for one reason.

Pure. The quarantine comes first, so that a rule may name a task that is no task; then faults of the
file, the user's selection, faults of what is selected, and the split."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from flotilla_common.tasks.task_files import TaskRow
from flotilla_reading.data.conventions import NO_DEFAULTS, Defaults
from flotilla_reading.data.entries import (
    FAULTS,
    DataError,
    Dropped,
    Entry,
    Prepared,
    Reason,
    drop,
    to_entry,
)
from flotilla_reading.data.lints import find_fault
from flotilla_reading.data.quarantine import Rule
from flotilla_reading.data.selection import Selection, check_names
from flotilla_reading.data.split import (
    KeptSplit,
    SplitRules,
    count_eval_tasks,
    find_cap,
    in_order,
)

# Most tasks that an error lists.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a source is prepared. `strict` makes a fault of the data an error; the lints of `allow`
    are left out; tasks of the split `kept` stay in the part that they were in. `defaults` are for
    rows that say less than a task does."""

    selection: Selection = field(default_factory=Selection)
    split: SplitRules = field(default_factory=SplitRules)
    max_env_share: Fraction | None = None
    quarantine: Sequence[Rule] = ()
    strict: bool = False
    allow: tuple[Reason, ...] = ()
    kept: KeptSplit | None = None
    defaults: Defaults = NO_DEFAULTS


def prepare(rows: Iterable[TaskRow], wishes: Wishes) -> Prepared:
    """Decide about each row. Raises DataError."""
    dropped: list[Dropped] = []
    entries, matches = _read_entries(rows, wishes.quarantine, dropped)
    check_names("--env", wishes.selection.envs, entries)
    check_names("--held-out", wishes.split.held_out, entries)
    chosen, surplus = wishes.selection.cut(_select(entries, wishes, dropped))
    dropped += [drop(entry, Reason.OVER_MAX_TASKS) for entry in surplus]
    train, evaluated = _split(chosen, wishes, dropped)
    train = _leave_out_equals(train, evaluated, dropped)
    if wishes.max_env_share is not None:
        train = _cap_shares(train, wishes.max_env_share, dropped)
    if wishes.strict:
        _refuse_faults(dropped)
    return Prepared(in_order(train), in_order(evaluated), dropped, matches)


def _read_entries(
    rows: Iterable[TaskRow], rules: Sequence[Rule], dropped: list[Dropped]
) -> tuple[list[Entry], list[int]]:
    """Return the different tasks of the rows, and how many rows each rule matches."""
    entries: dict[str, Entry] = {}
    matches = [0] * len(rules)
    for row in rows:
        matching = [n for n, rule in enumerate(rules) if row.key and rule.matches(row.key)]
        for number in matching:
            matches[number] += 1
        if matching:
            found = rules[matching[0]]
            why = f"{found}: {found.reason}"
            dropped.append(Dropped(row.place, row.key, row.env_key, Reason.QUARANTINED, why))
        elif row.task is None:
            dropped.append(Dropped(row.place, row.key, row.env_key, Reason.INVALID, row.fault))
        else:
            entry = to_entry(row, row.task)
            first = entries.setdefault(entry.key, entry)
            if first is not entry:
                dropped.append(_drop_repeated(first, entry))
    return list(entries.values()), matches


def _drop_repeated(first: Entry, entry: Entry) -> Dropped:
    if first.digest != entry.digest:
        raise DataError(
            f"{first.place} and {entry.place} have the key {entry.key!r} and differ; correct one,"
            " or drop both by a rule of --quarantine"
        )
    return drop(entry, Reason.REPEATED, f"the same as {first.place}")


def _select(entries: Iterable[Entry], wishes: Wishes, dropped: list[Dropped]) -> list[Entry]:
    left: list[Entry] = []
    for entry in entries:
        if found := wishes.selection.find_reason(entry) or find_fault(entry.task, wishes.allow):
            dropped.append(drop(entry, *found))
        else:
            left.append(entry)
    return left


def _split(
    entries: Iterable[Entry], wishes: Wishes, dropped: list[Dropped]
) -> tuple[list[Entry], list[Entry]]:
    """Return the tasks to train on, and those to evaluate on: of each environment first those that
    an earlier split evaluates on, then those that it has not.

    What `max_eval` leaves out is trained on, except for tasks of environments that are held out."""
    rules, envs = wishes.split, _by_env(entries)
    parts = _find_kept(envs, wishes)
    kept = {env: sum(parts[e.key] == "eval" for e in found) for env, found in envs.items()}
    counts = count_eval_tasks({env: len(found) for env, found in envs.items()}, rules, kept)
    train: list[Entry] = []
    evaluated: list[Entry] = []
    for env, found in envs.items():
        first = [entry for entry in found if parts[entry.key] == "eval"]
        free = [entry for entry in found if not parts[entry.key]]
        taken = [*first, *free][: counts[env]]
        keys = {entry.key for entry in taken}
        rest = [entry for entry in found if entry.key not in keys]
        evaluated += taken
        if env in rules.held_out:
            dropped += [drop(entry, Reason.OVER_MAX_EVAL) for entry in rest]
        else:
            train += rest
    return train, evaluated


def _find_kept(envs: Mapping[str, Sequence[Entry]], wishes: Wishes) -> dict[str, str]:
    """Return the part that an earlier split has each task in, "" if none. Raises DataError if it
    trains on an environment that is held out."""
    found = [entry for entries in envs.values() for entry in entries]
    if wishes.kept is None:
        return {entry.key: "" for entry in found}
    parts = {entry.key: wishes.kept.part_of(entry) for entry in found}
    for env in wishes.split.held_out:
        trained = sum(parts[entry.key] == "train" for entry in envs.get(env, ()))
        if trained:
            raise DataError(
                f"--held-out {env}: the split to keep, {wishes.kept.path}, trains on {trained} of"
                " its tasks; leave out one of the two"
            )
    return parts


def _leave_out_equals(
    train: Iterable[Entry], evaluated: Iterable[Entry], dropped: list[Dropped]
) -> list[Entry]:
    """Return the tasks whose question is in no task that is evaluated on."""
    asked = {entry.question: entry.key for entry in evaluated}
    left: list[Entry] = []
    for entry in train:
        if twin := asked.get(entry.question):
            dropped.append(drop(entry, Reason.EQUALS_EVAL, f"asks the same as {twin}"))
        else:
            left.append(entry)
    return left


def _cap_shares(train: Iterable[Entry], share: Fraction, dropped: list[Dropped]) -> list[Entry]:
    envs = _by_env(train)
    cap = find_cap({env: len(found) for env, found in envs.items()}, share)
    for found in envs.values():
        dropped += [drop(entry, Reason.OVER_ENV_SHARE) for entry in found[cap:]]
    return [entry for found in envs.values() for entry in found[:cap]]


def _by_env(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the tasks of each environment, in their order."""
    envs: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in in_order(entries):
        envs[entry.env_key].append(entry)
    return dict(sorted(envs.items()))


def _refuse_faults(dropped: Iterable[Dropped]) -> None:
    faults = [each for each in dropped if each.reason in FAULTS]
    if faults:
        shown = [
            f"  {each.place}{f' ({each.key})' if each.key else ''}: {each.reason}: {each.detail}"
            for each in faults[:_SHOWN]
        ]
        more = [f"  and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise DataError("\n".join([f"--strict: {len(faults)} tasks have faults", *shown, *more]))
