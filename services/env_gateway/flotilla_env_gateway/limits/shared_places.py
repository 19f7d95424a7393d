"""Places that all environments share, of which some stay free for others. No I/O, no clock."""

from collections import Counter
from typing import Protocol

from flotilla_env_gateway.limits.fair_queue import WeightOf, equal_weight

# An environment and a run.
Holder = tuple[str, str]


class SharingGate(Protocol):
    """A gate of the environment `name`."""

    name: str

    @property
    def waiting(self) -> int: ...

    def list_waiting_runs(self) -> list[str]: ...

    def let_in(self) -> bool:
        """Let in who may enter; return True if any did."""
        ...


class SharedPlaces:
    """Places for calls, shared by holders: a run's calls of one environment are one holder.

    A holder may take one more while it holds fewer than `a * weight` times the free places, with
    `a = (1 - s) / s` for a reserved share `s` (dynamic thresholds; Choudhury and Hahne, 1998). So
    a holder of weight 1 that keeps all it gets, such as that of a stuck environment, leaves `s`,
    and a second one `s` of that; the last place is for a holder that has none. Whoever comes next
    gets places at once, without waiting for any of theirs to come back. As calls end, what busy
    holders have comes to be in proportion to their weights: `a * weight * free` each."""

    def __init__(
        self, places: int, *, reserved_share: float, weight_of: WeightOf = equal_weight
    ) -> None:
        self._factor = (1 - reserved_share) / reserved_share if reserved_share else 0.0
        self._weight_of = weight_of
        self._held: Counter[Holder] = Counter()
        self._free = places
        self._gates: list[SharingGate] = []

    def may_take(self, holder: Holder) -> bool:
        held, free = self._held[holder], self._free
        if not self._factor or not held:
            return free > 0
        return free > 1 and held < self._factor * self._weight_of(holder[1]) * free

    def take_place(self, holder: Holder) -> None:
        self._held[holder] += 1
        self._free -= 1

    def give_back(self, holder: Holder) -> None:
        """Return a place, and let the gates use it: first that of the holder with the least for its
        weight, and of equals that which has waited longest."""
        self._free += 1
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
        waiting = [gate for gate in self._gates if gate.waiting]
        for gate in sorted(waiting, key=self._rank_gate):
            if gate.let_in():
                self._gates.remove(gate)
                self._gates.append(gate)

    def add_gate(self, gate: SharingGate) -> None:
        self._gates.append(gate)

    def _rank_gate(self, gate: SharingGate) -> float:
        runs = gate.list_waiting_runs()
        return min(self._held[gate.name, run] / self._weight_of(run) for run in runs)
