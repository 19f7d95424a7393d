import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from flotilla_common.healthcheck import check_health
from flotilla_common.process.runtime import Runtime
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.rpc.peer_channels import Peers
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_tinker.__main__ import client_flags, read_keys, serve_front
from flotilla_tinker.config.tinker import TinkerConfig
from tests.support.fake_desk import FakeDesk
from tests.support.waiting import until_seen

KEY = "tml-0123456789abcdef"


def test_keys_come_from_their_variables() -> None:
    assert read_keys({"alice": "$A"}, {"A": f"{KEY}\n"}) == {"alice": KEY}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "tinker.keys.alice: $A must hold a key of at least 16 characters"),
        ({"A": "sk-0123456789abcdef"}, "begins with tml-"),
        ({"A": "tml-short"}, "at least 16 characters"),
    ],
)
def test_a_key_that_no_client_could_send_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_keys({"alice": "$A"}, environ)


def test_two_names_cannot_share_a_key() -> None:
    with pytest.raises(ConfigError, match="two names have the same key"):
        read_keys({"alice": "$A", "bob": "$B"}, {"A": KEY, "B": KEY})


def test_clients_are_told_the_limits() -> None:
    config = TinkerConfig.model_validate(
        {"keys": {"a": "$A"}, "limits": {"body_bytes": 2**20, "samples": 7}}
    )

    assert client_flags(config) == {
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_bytes_count": 2**19,
        "sample_max_concurrent_requests": 7,
    }


async def test_it_serves_clients_and_its_health_until_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALICE_KEY", KEY)
    clients, health = free_address(), free_address()
    runtime = Runtime(
        service="tinker",
        config=TinkerConfig(listen=clients, keys={"alice": "$ALICE_KEY"}),
        shared=SharedConfig(name="x", policy=PolicyConfig(model="m", max_model_len=8)),
        spec={},
        run_id="x-1",
        run_dir=tmp_path,
        token="a" * 32,
        peers=Peers(token="a" * 32, run_id="x-1"),
        listen=health,
    )

    async def open_desk(_runtime: Runtime[TinkerConfig], _stack: AsyncExitStack) -> FakeDesk:
        return FakeDesk()

    serving = asyncio.create_task(serve_front(runtime, open_desk))
    await until_seen(lambda: check_health(health, None, 5.0), lambda reason: reason == "")
    async with httpx.AsyncClient(headers={"X-API-Key": KEY}) as http:
        flags = await http.post(f"http://{clients}/api/v1/client/config", json={"sdk_version": "1"})
    runtime.drain.set()
    await serving

    assert flags.json() == client_flags(runtime.config)
    assert await check_health(health, None, 5.0) != ""
