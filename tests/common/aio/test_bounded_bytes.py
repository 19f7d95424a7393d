"""A cache of bounded size in bytes."""

from flotilla_common.aio.bounded_bytes import BoundedBytes


def cache_of(*names: str) -> BoundedBytes[str, bytes]:
    kept: BoundedBytes[str, bytes] = BoundedBytes(10, len)
    for name in names:
        kept.keep(name, name.encode() * 4)
    return kept


def test_the_value_that_was_used_least_recently_is_dropped() -> None:
    kept = cache_of("a", "b")
    assert kept.get("a") == b"aaaa"
    kept.keep("c", b"cccc")
    assert ("a" in kept, "b" in kept, "c" in kept) == (True, False, True)
    assert kept.size == 8


def test_a_value_that_is_kept_again_counts_once() -> None:
    kept = cache_of("a", "b", "a")
    kept.keep("a", b"a")
    assert kept.size == 5 and kept.get("b") == b"bbbb"


def test_a_value_that_alone_is_too_large_drops_all_others() -> None:
    kept = cache_of("a", "b")
    kept.keep("c", bytes(11))
    assert ("a" in kept, "b" in kept, kept.size) == (False, False, 11)
    kept.keep("d", b"d")
    assert ("c" in kept, kept.size) == (False, 1)


def test_what_is_dropped_is_gone_and_dropping_it_again_changes_nothing() -> None:
    kept = cache_of("a")
    for _ in range(2):
        kept.drop("a")
        assert kept.get("a") is None and kept.size == 0


def test_values_are_bounded_in_number_too_if_that_is_asked_for() -> None:
    kept: BoundedBytes[int, bytes] = BoundedBytes(100, len, most_values=2)
    for number in range(4):
        kept.keep(number, b"")
    assert (len(kept), 1 in kept, 2 in kept, 3 in kept) == (2, False, True, True)
