"""Where machines elsewhere reach the launcher."""

import pytest

from services.launcher.sky.reach import UnreachableHostError, reachable


def test_what_the_spec_says_is_taken() -> None:
    assert reachable("0.0.0.0:4000", "launcher.example") == "launcher.example:4000"
    assert reachable("[::]:4000", "fd00::1") == "[fd00::1]:4000"


def test_an_address_of_this_machine_is_kept() -> None:
    assert reachable("10.1.2.3:4000", None) == "10.1.2.3:4000"


def test_loopback_is_refused_with_the_fix() -> None:
    with pytest.raises(UnreachableHostError, match=r"set launcher\.sky\.advertise"):
        reachable("127.0.0.1:4000", None)
