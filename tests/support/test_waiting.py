"""Waiting in tests: what a failure says, and that it ends."""

import time

import pytest

from tests.support.waiting import until, until_seen, wait_until


async def test_a_wait_in_vain_names_its_condition_and_the_state() -> None:
    found: list[int] = []
    with pytest.raises(AssertionError, match=r"0\.02 s in vain for .*len\(found\) == 7.*\n\[\]"):
        await until(lambda: len(found) == 7, 0.02, lambda: found)
    with pytest.raises(AssertionError, match=r"in vain for .*len\(found\) == 8"):
        wait_until(lambda: len(found) == 8, 0.02)
    with pytest.raises(AssertionError, match="in vain for <built-in method clear"):
        wait_until(found.clear, 0.02)


async def test_what_is_seen_at_last_is_returned_or_shown() -> None:
    begun = time.monotonic()

    async def look() -> float:
        return time.monotonic() - begun

    assert await until_seen(look, lambda seen: seen > 0.05) > 0.05
    with pytest.raises(AssertionError, match=r"in vain for .*seen < 0.*\n\d"):
        await until_seen(look, lambda seen: seen < 0, 0.02)
