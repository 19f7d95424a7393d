"""The orders of one model, in the order of the client's numbers although they arrive in any."""

from dataclasses import dataclass, field

from flotilla_tinker.store.order_rows import UNLOAD_SEQ
from flotilla_tinker.types import Category, Failure
from flotilla_tinker.work.order_book import OpenOrder

# Numbers of refused orders that are remembered until their turn.
_MOST_PASSED = 10_000


@dataclass(slots=True)
class ModelLine:
    """Orders that wait; `next_seq` is carried out next."""

    next_seq: int
    waiting: dict[int, OpenOrder] = field(default_factory=dict[int, OpenOrder])
    # Numbers of orders that were refused, and will not come.
    _passed: set[int] = field(default_factory=set[int])
    # When the orders that wait began to lack the next one; None if none does.
    _gap_since_s: float | None = None

    def next_order(self) -> OpenOrder | None:
        """Return the next order if it has arrived, or one that is to fail. A model is unloaded
        when no other order waits."""
        failing = [seq for seq, order in self.waiting.items() if order.failure]
        if failing:
            return self.waiting[min(failing)]
        if len(self.waiting) == 1 and UNLOAD_SEQ in self.waiting:
            return self.waiting[UNLOAD_SEQ]
        return self.waiting.get(self.next_seq)

    def add(self, order: OpenOrder) -> None:
        """Add an order; one that comes after a later one was given up or done, fails next."""
        seq = order.row.seq_id
        if UNLOAD_SEQ != seq < self.next_seq:
            text = f"order {seq} came when order {self.next_seq} was next"
            order.failure = Failure(text, Category.USER)
        self.waiting[seq] = order
        self._passed.discard(seq)

    def may_pass(self, seq: int) -> bool:
        """Return whether orders may come to wait for this number."""
        return seq >= self.next_seq and seq not in self.waiting and len(self._passed) < _MOST_PASSED

    def pass_over(self, seq: int) -> None:
        """Have no order wait for this number: its order was refused when it came."""
        if self.may_pass(seq):
            self._passed.add(seq)
            self.next_seq = self._following(self.next_seq)

    def remove(self, order: OpenOrder) -> None:
        """Remove an order that has a result; the one after it is next."""
        del self.waiting[order.row.seq_id]
        self.next_seq = self.seq_after(order)
        self._passed = {seq for seq in self._passed if seq > self.next_seq}

    def seq_after(self, order: OpenOrder) -> int:
        return self._following(max(self.next_seq, order.row.seq_id + 1))

    def _following(self, seq: int) -> int:
        """Return the first number from `seq` on that was not passed over."""
        while seq in self._passed:
            seq += 1
        return seq

    def give_up_overdue(self, now: float, limit_s: float) -> None:
        """Have all orders fail if an earlier one has not come for `limit_s`."""
        if not self.waiting or self.next_order() is not None:
            self._gap_since_s = None
            return
        if self._gap_since_s is None:
            self._gap_since_s = now
        if now - self._gap_since_s < limit_s:
            return
        self._gap_since_s = None
        text = f"order {self.next_seq} of this model has not come for {limit_s:g} s"
        for seq, order in self.waiting.items():
            if seq != UNLOAD_SEQ:
                order.failure = Failure(text, Category.USER)
