"""Orders of a model run in the order of their numbers, however they arrive."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_tinker.store.order_rows import UNLOAD_SEQ, OrderRow
from flotilla_tinker.types import Kind, Pending
from flotilla_tinker.work.model_line import ModelLine
from flotilla_tinker.work.order_book import OpenOrder
from tests.support.examples import examples
from tests.tinker.work.desk_doubles import an_order
from tests.tinker.work.shop import a_shop, read


def an_open_order(seq_id: int) -> OpenOrder:
    row = OrderRow(0, "", Kind.FORWARD, "ann", "s", "m", seq_id, 1, 0.0, {}, "open")
    return OpenOrder(row, None, outcome=None)  # pyright: ignore[reportArgumentType]


@settings(max_examples=examples(100), deadline=None)
@given(st.permutations(range(1, 9)), st.data())
def test_a_line_gives_orders_in_turn(arrivals: list[int], data: st.DataObject) -> None:
    line, done, coming = ModelLine(1), list[int](), [*arrivals, UNLOAD_SEQ]
    while coming or line.waiting:
        ready = line.next_order()
        if coming and (ready is None or data.draw(st.booleans())):
            line.add(an_open_order(coming.pop(0)))
            continue
        assert ready is not None
        done.append(ready.row.seq_id)
        line.remove(ready)
    assert done == [*range(1, 9), UNLOAD_SEQ]


@settings(max_examples=examples(100), deadline=None)
@given(st.permutations(range(1, 9)), st.sets(st.integers(1, 8)))
def test_a_line_waits_for_no_number_that_was_passed_over(
    arrivals: list[int], refused: set[int]
) -> None:
    line, done = ModelLine(1), list[int]()
    for seq in arrivals:
        if seq in refused:
            line.pass_over(seq)
            line.pass_over(seq)
        else:
            line.add(an_open_order(seq))
        while (ready := line.next_order()) is not None:
            done.append(ready.row.seq_id)
            line.remove(ready)
    assert done == [seq for seq in range(1, 9) if seq not in refused]
    assert line.next_seq == 9


def test_a_number_that_was_passed_over_and_comes_after_all_is_in_turn() -> None:
    line = ModelLine(1)
    line.pass_over(2)
    for seq in (2, 1):
        line.add(an_open_order(seq))
    for seq in (1, 2):
        ready = line.next_order()
        assert ready is not None
        assert (ready.row.seq_id, ready.failure) == (seq, None)
        line.remove(ready)


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(st.integers(1, 12), min_size=1), st.sets(st.integers(1, 12)))
def test_no_order_stays_when_numbers_never_come(first: set[int], later: set[int]) -> None:
    line, ended = ModelLine(1), dict[int, bool]()

    def carry_out_all() -> None:
        while (order := line.next_order()) is not None:
            ended[order.row.seq_id] = order.failure is not None
            line.remove(order)

    def add_all(seqs: set[int]) -> None:
        for seq in seqs:
            line.add(an_open_order(seq))
        carry_out_all()

    def wait_in_vain(now: float) -> None:
        line.give_up_overdue(now, 10.0)
        line.give_up_overdue(now + 9.0, 10.0)
        before = set(line.waiting)
        carry_out_all()
        assert set(line.waiting) == before
        line.give_up_overdue(now + 10.0, 10.0)
        carry_out_all()

    add_all(first)
    wait_in_vain(0.0)
    add_all(later - first)
    wait_in_vain(100.0)
    assert not line.waiting
    assert set(ended) == first | later
    in_turn = next(seq for seq in range(1, 14) if seq not in first)
    assert [seq for seq in sorted(first) if not ended[seq]] == list(range(1, in_turn))


async def test_a_model_that_waits_for_a_number_holds_up_no_other(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        waiting, other = await shop.model(0), await shop.model(1)
        orders = [
            an_order(Kind.FORWARD_BACKWARD, shop.session, waiting, seq, tokens=[seq])
            for seq in (1, 2)
        ]
        second = await shop.desk.submit(orders[1])
        for seq in range(1, 6):
            read(await shop.train(other, Kind.FORWARD_BACKWARD, seq, tokens=[1]))
        assert isinstance(await shop.desk.wait("ann", second.request_id, 0), Pending)
        read(await shop.order(orders[0]))
        read(await shop.result_of(second.request_id))
