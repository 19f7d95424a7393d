from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from flotilla_tinker.api.adapters.http_server import ServerSettings, serving_http
from flotilla_tinker.api.calls import Front
from flotilla_tinker.api.keys import ClientKeys
from flotilla_tinker.api.known_facts import KnownFacts
from tests.support.fake_desk import FakeDesk

BODY_BYTES = 2**20
KEY = "tml-alice-0123456789"


@dataclass(frozen=True, slots=True)
class ServedDesk:
    """A front door over a desk in memory, and a client with alice's key."""

    desk: FakeDesk
    http: httpx.AsyncClient

    async def post(self, path: str, /, **fields: Any) -> httpx.Response:
        return await self.send(path, msgspec.json.encode(fields))

    async def send(self, path: str, body: bytes, /, **headers: str) -> httpx.Response:
        return await self.http.post(f"/api/v1{path}", content=body, headers=headers)

    async def get(self, path: str, /, **query: Any) -> httpx.Response:
        return await self.http.get(f"/api/v1{path}", params=query)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncGenerator[ServedDesk]:
    """One server for a module: each takes a fifth of a second to end."""
    desk = FakeDesk()
    front = Front(desk, KnownFacts(desk), poll_s=0.05)
    keys = ClientKeys({"alice": KEY, "bob": "tml-bob-0123456789"})
    settings = ServerSettings("127.0.0.1", 0, BODY_BYTES)
    async with (
        serving_http(front, keys, settings) as address,
        httpx.AsyncClient(base_url=f"http://{address}", headers={"X-API-Key": KEY}) as http,
    ):
        yield ServedDesk(desk, http)


@pytest.fixture
def served(server: ServedDesk) -> ServedDesk:
    """The server, with a new desk. Tests that use it share the loop of their module."""
    server.desk.reset()
    return server
