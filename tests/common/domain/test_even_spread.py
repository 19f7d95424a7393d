"""A number of items, spread over groups of different sizes."""

import random
from collections import Counter

from flotilla_common.domain.even_spread import spread_evenly

Item = tuple[str, str]
# Sorted by group, as task files are.
SIZES = {"a": 20, "b": 2, "c": 20, "d": 5}
ITEMS: list[Item] = [(group, f"{group}{n}") for group, size in SIZES.items() for n in range(size)]


def spread(items: list[Item], count: int | None) -> list[Item]:
    return spread_evenly(items, count, group_of=lambda item: item[0], key_of=lambda item: item[1])


def test_every_group_gives_as_many_as_the_others_while_it_has_any() -> None:
    assert Counter(group for group, _ in spread(ITEMS, 12)) == {"a": 4, "b": 2, "c": 3, "d": 3}
    assert Counter(group for group, _ in spread(ITEMS, 30)) == {"a": 12, "b": 2, "c": 11, "d": 5}


def test_the_order_of_the_items_does_not_matter_and_more_keep_what_fewer_take() -> None:
    shuffled = random.Random(0).sample(ITEMS, len(ITEMS))
    assert spread(shuffled, 12) == spread(ITEMS, 12) == spread(ITEMS, 30)[:12]


def test_all_items_stay_as_they_are() -> None:
    for count in (None, len(ITEMS), 1000):
        assert spread(ITEMS, count) == ITEMS
    assert spread([], 3) == []
