import asyncio
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.security.certificates import mint_identity
from flotilla_tinker.api.adapters.http_server import ServerSettings, serving_http
from flotilla_tinker.api.calls import Front
from flotilla_tinker.api.keys import ClientKeys
from flotilla_tinker.api.known_facts import KnownFacts
from tests.support.fake_desk import FakeDesk
from tests.tinker.wire.examples import make_sample_body

KEY = "tml-alice-0123456789"
SETTINGS = ServerSettings("127.0.0.1", 0, 2**20)
KEYS = ClientKeys({"alice": KEY})


def _make_front(poll_s: float = 0.05) -> Front:
    desk = FakeDesk()
    return Front(desk, KnownFacts(desk), poll_s=poll_s)


async def test_it_serves_under_tls(tmp_path: Path) -> None:
    member = mint_identity("run", ("tinker",)).tls_for("tinker")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(member.certificate)
    key.write_bytes(member.key)
    context = ssl.create_default_context(cadata=member.ca.decode())
    context.check_hostname = False
    settings = replace(SETTINGS, certificate=certificate, key=key)

    async with (
        serving_http(_make_front(), KEYS, settings) as address,
        httpx.AsyncClient(verify=context) as http,
    ):
        answer = await http.get(f"https://{address}/api/v1/healthz")

    assert answer.json() == {"status": "ok"}


async def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("nothing")
    settings = replace(SETTINGS, certificate=wrong, key=wrong)

    with pytest.raises(ConfigError, match=r"tinker\.tls: the files are not usable PEM"):
        async with serving_http(_make_front(), KEYS, settings):
            pytest.fail("it serves")


async def test_an_address_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(SETTINGS, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"tinker\.listen: cannot listen on 127\.0\.0\.1"):
            async with serving_http(_make_front(), KEYS, settings):
                pytest.fail("it serves")


async def test_its_end_waits_for_no_long_poll() -> None:
    async with httpx.AsyncClient(headers={"X-API-Key": KEY}) as http:
        async with serving_http(_make_front(poll_s=60), KEYS, SETTINGS) as address:
            url = f"http://{address}/api/v1"
            (await http.post(f"{url}/asample", content=make_sample_body())).raise_for_status()
            polling = asyncio.create_task(
                http.post(f"{url}/retrieve_future", json={"request_id": "r0"}, timeout=60)
            )
            await asyncio.sleep(0.1)
            begun_s = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - begun_s < 10
        with pytest.raises(httpx.HTTPError):
            (await polling).raise_for_status()
