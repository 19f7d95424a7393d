"""Who is next: fair shares between runs, by weight. No I/O, no clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

WeightOf = Callable[[str], float]


def equally(run_id: str) -> float:
    """The same weight for every run."""
    return 1.0


@dataclass(slots=True)
class _Share:
    """`turn` is when the run's next place is due, in virtual time; `joined` when it last began to
    wait, by a count."""

    weight: float
    turn: float
    joined: int = 0
    waits: bool = False
    held: int = 0

    @property
    def rank(self) -> tuple[float, float, int]:
        return (self.held / self.weight, self.turn, self.joined)


class Shares:
    """What each run holds of something, and which run comes next.

    The run that holds the least for its weight is first (max-min fairness), so that one whose work
    takes long cannot gather all places. Between equals the one whose turn is due is first
    (start-time fair queuing; Goyal, Vin and Cheng, 1996): every run gets on when there are more
    runs than places. No turn is before the one that was last due, or a run that held a lot could
    later have all that it let pass at once.
    """

    def __init__(self, weight_of: WeightOf = equally) -> None:
        self._weight_of = weight_of
        self._shares: dict[str, _Share] = {}
        self._turn = 0.0
        self._joins = 0

    def __len__(self) -> int:
        return len(self._shares)

    def held(self, run_id: str) -> int:
        share = self._shares.get(run_id)
        return share.held if share else 0

    def join(self, run_id: str) -> None:
        """A run begins to wait."""
        share = self._shares.get(run_id)
        if share is None:
            share = self._shares[run_id] = _Share(self._weight_of(run_id), self._turn)
        self._joins += 1
        share.joined, share.waits = self._joins, True

    def leave(self, run_id: str) -> None:
        """A run does not wait any more."""
        self._shares[run_id].waits = False
        self._tidy()

    def ordered(self) -> list[str]:
        """The runs that wait, the next one first."""
        waiting = (run_id for run_id, share in self._shares.items() if share.waits)
        return sorted(waiting, key=lambda run_id: self._shares[run_id].rank)

    def take(self, run_id: str, places: int = 1) -> None:
        """A run that waits gets places."""
        share = self._shares[run_id]
        self._turn = share.turn
        share.held += places
        share.turn += places / share.weight
        for one in self._shares.values():
            one.turn = max(one.turn, self._turn)

    def give_back(self, run_id: str, places: int = 1) -> None:
        self._shares[run_id].held -= places
        self._tidy()

    def _tidy(self) -> None:
        """Forget runs that hold nothing and wait for nothing, as soon as it makes no difference
        whether their turn is due or not."""
        contended = any(share.waits for share in self._shares.values())
        for run_id, share in list(self._shares.items()):
            owes = contended and share.turn > self._turn
            if not (share.waits or share.held or owes):
                del self._shares[run_id]


class FairQueue(Generic[T]):
    """Items that wait for one place each; within a run first come, first served."""

    def __init__(self, weight_of: WeightOf = equally) -> None:
        self.shares = Shares(weight_of)
        # Dictionaries for their order: whoever gives up leaves from anywhere.
        self._waiting: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, run_id: str, item: T) -> None:
        if run_id not in self._waiting:
            self.shares.join(run_id)
            self._waiting[run_id] = {}
        self._waiting[run_id][item] = None

    def pop(self) -> tuple[str, T]:
        """The next item, whose run holds one place more until `give_back`."""
        run_id = self.shares.ordered()[0]
        item = next(iter(self._waiting[run_id]))
        self.shares.take(run_id)
        self.discard(run_id, item)
        return run_id, item

    def discard(self, run_id: str, item: T) -> None:
        """Forget an item that waits; one that does not is no fault."""
        items = self._waiting.get(run_id)
        if items is None:
            return
        items.pop(item, None)
        if not items:
            del self._waiting[run_id]
            self.shares.leave(run_id)

    def give_back(self, run_id: str) -> None:
        self.shares.give_back(run_id)
