"""A cache of bounded size in bytes."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedBytes(Generic[K, V]):
    """The values that were used last, of at most `most` bytes together, and at most `most_values`;
    one that is larger is kept alone."""

    def __init__(
        self, most: int, size_of: Callable[[V], int], *, most_values: float = math.inf
    ) -> None:
        self._most = most
        self._most_values = most_values
        self._size_of = size_of
        self._kept: OrderedDict[K, V] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def get(self, key: K) -> V | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: K, value: V) -> None:
        self.drop(key)
        self._kept[key] = value
        self.size += self._size_of(value)
        while len(self) > 1 and (self.size > self._most or len(self) > self._most_values):
            self.drop(next(iter(self._kept)))

    def drop(self, key: K) -> None:
        """Drop a value, if it is kept."""
        if key in self._kept:
            self.size -= self._size_of(self._kept.pop(key))
