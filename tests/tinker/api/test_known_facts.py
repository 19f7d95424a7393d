import pytest

from flotilla_tinker.api.known_facts import KnownFacts
from flotilla_tinker.work.desk_errors import Away
from tests.support.fake_desk import BASE, ENGINE, FakeDesk


class SteppedClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_facts_are_asked_for_again_when_they_are_old() -> None:
    desk, clock = FakeDesk(), SteppedClock()
    facts = KnownFacts(desk, clock)

    for now_s in (100.0, 109.0, 111.0, 112.0):
        clock.now_s = now_s
        assert await facts.get() == (BASE, ENGINE)

    assert desk.asked_facts == 2


async def test_the_last_facts_count_while_a_peer_is_away() -> None:
    desk, clock = FakeDesk(), SteppedClock()
    facts = KnownFacts(desk, clock)
    await facts.get()
    clock.now_s, desk.error = 200.0, Away("the trainer is away")

    assert await facts.get() == (BASE, ENGINE)


async def test_without_any_facts_a_call_is_refused_until_a_peer_comes() -> None:
    desk = FakeDesk()
    facts = KnownFacts(desk, SteppedClock())
    desk.error = Away("the trainer is away")

    with pytest.raises(Away):
        await facts.get()
    assert await facts.get() == (BASE, ENGINE)
