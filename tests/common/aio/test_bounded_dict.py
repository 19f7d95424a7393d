"""A dictionary of bounded size."""

from flotilla_common.aio.bounded_dict import BoundedDict


def test_the_entry_that_was_set_first_is_dropped() -> None:
    kept: BoundedDict[str, int] = BoundedDict(2)
    for number, name in enumerate("abc"):
        kept[name] = number
    assert kept == {"b": 1, "c": 2}


def test_an_entry_that_is_set_again_is_kept_longer() -> None:
    kept: BoundedDict[str, int] = BoundedDict(2)
    for name in "abac":
        kept[name] = 0
    assert list(kept) == ["a", "c"]


def test_a_default_counts_as_set() -> None:
    kept: BoundedDict[str, int] = BoundedDict(1)
    kept["a"] = 1
    assert kept.setdefault("b", 2) == 2
    assert kept == {"b": 2}
