"""Equal shares between tenants that always want more."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_tinker.work.fair_share import FairShare
from tests.support.examples import examples

COSTS = st.lists(st.integers(1, 100), min_size=3, max_size=3)


@settings(max_examples=examples(100), deadline=None)
@given(COSTS)
def test_tenants_that_always_want_more_get_equal_costs(costs: list[int]) -> None:
    shares, names = FairShare(), ["ann", "bob", "cid"]
    spent = Counter[str]()
    for _ in range(1000):
        tenant = shares.choose_next(names)
        cost = costs[names.index(tenant)]
        shares.charge(tenant, cost)
        spent[tenant] += cost
    assert max(spent.values()) - min(spent.values()) <= 2 * max(costs)


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    shares = FairShare()
    shares.charge("bob", 1)
    for _ in range(100):
        shares.charge("ann", 1)
    turns = Counter[str]()
    for _ in range(20):
        tenant = shares.choose_next(["ann", "bob"])
        shares.charge(tenant, 1)
        turns[tenant] += 1
    assert turns == {"ann": 10, "bob": 10}


def test_one_large_order_is_paid_for_afterwards() -> None:
    shares = FairShare()
    shares.charge("ann", 10)
    turns = [shares.choose_next(["ann", "bob"])]
    for _ in range(11):
        shares.charge(turns[-1], 1)
        turns.append(shares.choose_next(["ann", "bob"]))
    assert turns[:10] == ["bob"] * 10
    assert "ann" in turns[10:]
