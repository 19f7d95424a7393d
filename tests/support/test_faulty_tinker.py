"""The proxy in front of a real front door: what fails, and what the service sees of it."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from tests.support.faulty_tinker import FaultyTinker, faulty_tinker
from tests.support.tinker_front import KEY, serving_front
from tests.tinker.work.desk_doubles import ScriptedEngine, ScriptedTrainer


@pytest.fixture
async def arrived(tmp_path: Path) -> AsyncGenerator[FaultyTinker]:
    """A proxy that only counts what arrives at the service."""
    async with (
        serving_front(tmp_path, ScriptedTrainer(), ScriptedEngine()) as url,
        faulty_tinker(url) as one,
    ):
        yield one


@pytest.fixture
async def proxy(arrived: FaultyTinker) -> AsyncGenerator[FaultyTinker]:
    async with faulty_tinker(arrived.url) as one:
        yield one


@pytest.fixture
async def http(proxy: FaultyTinker) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"{proxy.url}/api/v1", headers={"X-API-Key": KEY}, timeout=20
    ) as one:
        yield one


async def _open_session(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"})


async def test_calls_pass_through_and_are_counted(
    proxy: FaultyTinker, http: httpx.AsyncClient
) -> None:
    assert (await _open_session(http)).json()["session_id"]
    assert (await http.get("/sessions/never")).status_code == 404
    assert (proxy.count("create_session"), proxy.count("sessions/*")) == (1, 1)


async def test_so_many_calls_are_refused_and_never_arrive(
    proxy: FaultyTinker, http: httpx.AsyncClient, arrived: FaultyTinker
) -> None:
    proxy.refuse("create_session", 429, times=2)
    proxy.refuse("create_*", 408, body={"queue_state": "paused_capacity"})
    answers = [await _open_session(http) for _ in range(4)]
    assert [each.status_code for each in answers] == [429, 429, 408, 200]
    assert answers[2].json() == {"queue_state": "paused_capacity"}
    assert arrived.count("create_session") == 1


@pytest.mark.parametrize("carried_out", [False, True])
async def test_a_dropped_call_was_carried_out_or_not(
    proxy: FaultyTinker, http: httpx.AsyncClient, arrived: FaultyTinker, *, carried_out: bool
) -> None:
    proxy.drop("create_session", carried_out=carried_out)
    with pytest.raises(httpx.TransportError):
        await _open_session(http)
    assert arrived.count("create_session") == carried_out


async def test_a_call_is_late(proxy: FaultyTinker, http: httpx.AsyncClient) -> None:
    proxy.delay("create_session", 0.3)
    begun = asyncio.get_running_loop().time()
    assert (await _open_session(http)).status_code == 200
    assert asyncio.get_running_loop().time() - begun > 0.3


async def test_an_outage_ends_what_is_under_way_and_lasts_until_it_is_healed(
    proxy: FaultyTinker, http: httpx.AsyncClient
) -> None:
    proxy.delay("create_session", 5.0)
    waiting = asyncio.create_task(_open_session(http))
    await asyncio.sleep(0.1)
    proxy.go_down()
    for call in (waiting, asyncio.create_task(_open_session(http))):
        with pytest.raises(httpx.TransportError):
            await asyncio.wait_for(call, 2.0)
    proxy.heal()
    assert (await _open_session(http)).status_code == 200


async def test_a_service_that_is_away_looks_like_an_outage(
    proxy: FaultyTinker, http: httpx.AsyncClient
) -> None:
    served, proxy.upstream = proxy.upstream, "http://127.0.0.1:9"
    with pytest.raises(httpx.TransportError):
        await _open_session(http)
    proxy.upstream = served
    assert (await _open_session(http)).status_code == 200
