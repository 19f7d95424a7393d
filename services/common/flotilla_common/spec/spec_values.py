"""Values of run specs by dotted keys such as `learner.optimizer.lr`, and the keys by which specs
differ. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# In place of a value that a spec does not have; it may also be a default.
ABSENT = object()
_SHOWN_CHARACTERS = 80


def planned_steps(spec: Any) -> int | None:
    """Return the optimizer steps of a run, those of a warm start included; None if its spec does
    not say."""
    steps, warm = (find_value(spec, f"learner.{key}") for key in ("steps", "warm_start.steps"))
    if not isinstance(steps, int):
        return None
    return steps + warm if isinstance(warm, int) else steps


def find_value(spec: Any, key: str) -> Any:
    """Return the value under a key, whose parts may have dots and count the items of lists; ABSENT
    if there is none."""
    if not key:
        return spec
    items = dict(enumerate(spec)) if isinstance(spec, list) else spec
    for name, value in items.items() if isinstance(items, Mapping) else ():
        rest = key.removeprefix(str(name))
        if rest != key and (not rest or rest[0] == "."):
            found = find_value(value, rest[1:])
            if found is not ABSENT:
                return found
    return ABSENT


def diff_values(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every differing key with both values. Lists differ as a whole, unless they hold as many
    tables."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = dict.fromkeys((*old, *new))
        pairs = [(name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in names]
    elif _is_table_list(old) and _is_table_list(new) and len(old) == len(new):
        pairs = [(str(at), *pair) for at, pair in enumerate(zip(old, new, strict=True))]
    else:
        if not is_equal(old, new):
            yield key, old, new
        return
    for name, before, after in pairs:
        yield from diff_values(before, after, f"{key}.{name}" if key else name)


def is_equal(one: Any, other: Any) -> bool:
    """Return whether values are the same: 1 and 1.0 are, and true is no number."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def compare_specs(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all specs under each key by which one differs from the first, except
    for which Flotilla wrote them."""
    first, *others = ({k: v for k, v in spec.items() if k != "written_by"} for spec in specs)
    keys = dict.fromkeys(key for other in others for key, _, _ in diff_values(first, other))
    return {key: [find_value(spec, key) for spec in specs] for key in keys}


def format_value(value: Any, absent: str = "none") -> str:
    """Format a value of a spec on one line, shortened."""
    if value is ABSENT:
        return absent
    text = repr(value)
    return f"{text[:_SHOWN_CHARACTERS]}..." if len(text) > _SHOWN_CHARACTERS else text


def _is_table_list(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)
