"""What a process without a session says of a service that does not answer."""

import pytest
from aiohttp import web

from flotilla_common.adapters.tinker_service import find_silence
from flotilla_common.spec.spec import TinkerConfig
from tests.support.http_server import serving_app

pytestmark = pytest.mark.usefixtures("key")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123456789abcdef")


async def test_silence_names_address_and_cause() -> None:
    why = await find_silence(TinkerConfig(url="http://127.0.0.1:1"))
    assert "127.0.0.1:1" in why and "refused" in why.lower()


@pytest.mark.parametrize(
    ("status", "silent"), [(200, False), (401, False), (402, True), (503, True)]
)
async def test_a_service_is_silent_while_it_answers_nobody(status: int, *, silent: bool) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, status=status)

    app = web.Application()
    app.router.add_get("/api/v1/healthz", answer)
    async with serving_app(app) as url:
        assert bool(await find_silence(TinkerConfig(url=url))) == silent
