"""Messages that never end: how much of them is read, and for how long."""

import asyncio

import pytest

from flotilla_common.rpc import first_message_deadline, rpc
from tests.support import echo_service
from tests.support.half_sent_calls import MESSAGE_BYTES, half_sent

KINDS = ("Echo", "Count", "Join", "Repeat")


def path(name: str) -> str:
    return f"/{echo_service.SERVICE}/{name}"


@pytest.mark.parametrize("name", KINDS)
async def test_of_a_caller_without_the_token_no_message_is_read(name: str) -> None:
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with rpc.serving(server, "127.0.0.1:0") as at, half_sent(at.address) as connection:
        call = connection.call(path(name))
        await asyncio.wait_for(connection.answered[call].wait(), 60)
        assert connection.sent[call] < MESSAGE_BYTES


@pytest.mark.parametrize("name", KINDS)
async def test_a_message_that_does_not_end_is_waited_for_within_bounds(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(first_message_deadline, "_SLOW_S", 0.05)
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with rpc.serving(server, "127.0.0.1:0") as at, half_sent(at.address) as connection:
        call = connection.call(path(name), echo_service.TOKEN)
        await asyncio.wait_for(connection.answered[call].wait(), 60)


async def test_while_many_are_slow_those_who_come_have_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_message_deadline, "_MOST_SLOW", 2)
    monkeypatch.setattr(first_message_deadline, "_MOMENT_S", 0.05)
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with (
        rpc.serving(server, "127.0.0.1:0") as at,
        half_sent(at.address) as connection,
        rpc.channel(at.address, token=echo_service.TOKEN) as channel,
    ):
        slow = [connection.call(path("Echo"), echo_service.TOKEN) for _ in range(2)]
        late = connection.call(path("Echo"), echo_service.TOKEN)
        await asyncio.wait_for(connection.answered[late].wait(), 60)
        assert not any(connection.answered[call].is_set() for call in slow)
        # A caller that sends its message is served.
        assert await echo_service.call(channel, "served") == "served"
