"""Fair order: shares between runs, by weight. No I/O, no clock."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

WeightOf = Callable[[str], float]


def equal_weight(run_id: str) -> float:
    """Return the same weight for every run."""
    return 1.0


@dataclass(slots=True)
class _Share:
    """One run's share. `turn` is when its next place is due, in virtual time; `joined` is the
    count at which it last began to wait."""

    weight: float
    turn: float
    joined: int = 0
    waits: bool = False
    held: int = 0

    @property
    def rank(self) -> tuple[float, float, int]:
        return (self.held / self.weight, self.turn, self.joined)


class FairShares:
    """Shares of each run, and the order in which runs come next.

    The run that holds the least for its weight is first (max-min fairness), so that a run
    with long work cannot gather all places. Between equals the one whose turn is due is
    first (start-time fair queuing; Goyal, Vin and Cheng, 1996): every run advances even
    with more runs than places. No turn is earlier than the one that was last due; otherwise
    a run that held many places could later claim all the turns that it let pass at once."""

    def __init__(self, weight_of: WeightOf = equal_weight) -> None:
        self.weight_of = weight_of
        self._shares: dict[str, _Share] = {}
        self._turn = 0.0
        self._joins = 0

    def __len__(self) -> int:
        return len(self._shares)

    def start_waiting(self, run_id: str) -> None:
        """Mark a run as waiting."""
        share = self._shares.get(run_id)
        if share is None:
            share = self._shares[run_id] = _Share(self.weight_of(run_id), self._turn)
        self._joins += 1
        share.joined, share.waits = self._joins, True

    def stop_waiting(self, run_id: str) -> None:
        """Mark a run as no longer waiting."""
        self._shares[run_id].waits = False
        self._forget_idle_runs()

    def ordered_runs(self) -> list[str]:
        """Return the waiting runs, the next one first."""
        waiting = (run_id for run_id, share in self._shares.items() if share.waits)
        return sorted(waiting, key=lambda run_id: self._shares[run_id].rank)

    def take_places(self, run_id: str, places: int = 1) -> None:
        """Give places to a waiting run."""
        share = self._shares[run_id]
        self._turn = share.turn
        share.held += places
        share.turn += places / share.weight
        for one in self._shares.values():
            one.turn = max(one.turn, self._turn)

    def give_back(self, run_id: str, places: int = 1) -> None:
        self._shares[run_id].held -= places
        self._forget_idle_runs()

    def _forget_idle_runs(self) -> None:
        """Forget runs that hold nothing and wait for nothing, as soon as it makes no difference
        whether their turn is due or not."""
        contended = any(share.waits for share in self._shares.values())
        for run_id, share in list(self._shares.items()):
            owes = contended and share.turn > self._turn
            if not (share.waits or share.held or owes):
                del self._shares[run_id]


class FairQueue(Generic[T]):
    """Items that wait for one place each; within a run first come, first served."""

    def __init__(self, weight_of: WeightOf = equal_weight) -> None:
        self.shares = FairShares(weight_of)
        # Ordered dictionaries, because a waiter may leave from any position.
        self._waiting: dict[str, OrderedDict[T, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, run_id: str, item: T, *, first: bool = False) -> None:
        """Add an item behind the others of its run, or before them."""
        if run_id not in self._waiting:
            self.shares.start_waiting(run_id)
            self._waiting[run_id] = OrderedDict()
        self._waiting[run_id][item] = None
        if first:
            self._waiting[run_id].move_to_end(item, last=False)

    def waiting_of(self, run_id: str) -> Iterator[T]:
        return iter(self._waiting.get(run_id, ()))

    def count_others(self, run_id: str, own: int) -> int:
        """Count the items of other runs that come before a run's next one, after `own` of its."""
        weight_of = self.shares.weight_of
        turns = (own + 1) / weight_of(run_id)
        others = ((one, items) for one, items in self._waiting.items() if one != run_id)
        return int(sum(min(len(items), turns * weight_of(one)) for one, items in others))

    def pop(self, run_id: str) -> T:
        """Remove and return a run's next item; the run holds one more place until `give_back`."""
        item = next(iter(self._waiting[run_id]))
        self.shares.take_places(run_id)
        self.discard(run_id, item)
        return item

    def discard(self, run_id: str, item: T) -> None:
        """Remove an item if it is waiting."""
        items = self._waiting.get(run_id)
        if items is None:
            return
        items.pop(item, None)
        if not items:
            del self._waiting[run_id]
            self.shares.stop_waiting(run_id)

    def give_back(self, run_id: str) -> None:
        self.shares.give_back(run_id)
