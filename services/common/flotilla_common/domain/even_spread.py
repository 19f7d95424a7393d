"""A number of items, taken evenly from all groups. Pure."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")


def spread_evenly(
    items: Sequence[T],
    count: int | None,
    *,
    group_of: Callable[[T], str],
    key_of: Callable[[T], str],
) -> list[T]:
    """Return `count` items, as many from each group as from the others while it has any; all items
    as they are if there are no more.

    Groups take turns in order of name, and give those with the lowest hashes of their keys: the
    order of `items` does not matter, and a larger count keeps what a smaller one takes."""
    if count is None or count >= len(items):
        return list(items)
    groups: defaultdict[str, list[T]] = defaultdict(list)
    for item in sorted(items, key=lambda item: hashlib.sha256(key_of(item).encode()).digest()):
        groups[group_of(item)].append(item)
    turns = zip_longest(*(groups[name] for name in sorted(groups)))
    return [item for turn in turns for item in turn if item is not None][:count]
