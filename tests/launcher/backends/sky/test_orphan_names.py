"""A name alone identifies its owner and shows whether its run is active."""

import pytest

from flotilla_launcher.backends.sky import names
from flotilla_launcher.backends.sky.orphan_names import is_of_run, is_orphan_name, run_mark_of
from flotilla_launcher.state import ROLLOUT

OWNER = "abcde"
NAME = names.member_name(OWNER, "run-1", (ROLLOUT, 0))


@pytest.mark.parametrize(
    ("name", "active", "orphan"),
    [
        (NAME, [], True),
        (f"{NAME}-12-worker", ["run-2"], True),
        (NAME, ["run-2", "run-1"], False),
        (names.member_name("xyz", "run-1", (ROLLOUT, 0)), [], False),
        # A shorter owner may begin like a longer one.
        (names.member_name("abc", "run-1", (ROLLOUT, 0)), [], False),
        ("strange-name", [], False),
    ],
)
def test_an_orphan_has_our_mark_and_that_of_no_active_run(
    name: str, active: list[str], orphan: bool
) -> None:
    assert is_orphan_name(name, OWNER, active) is orphan


def test_a_name_is_of_one_run_of_one_launcher() -> None:
    assert is_of_run(NAME, OWNER, "run-1")
    assert not is_of_run(NAME, OWNER, "run-2")
    assert not is_of_run(NAME, "xyz", "run-1")
    assert (run_mark_of(NAME), run_mark_of("strange-name")) == (names.run_mark(OWNER, "run-1"), "")
