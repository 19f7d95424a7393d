"""A caller from outside the run gets nothing out of any service: every rpc of every contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from flotilla_common.rpc import rpc
from flotilla_common.rpc.tls import Tls
from tests.support.every_rpc import Recorder, refusals, rpcs
from tests.support.outsiders import beyond_loopback, member, other_run, outsiders, run

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
TOKENS = {"none": None, "wrong": "not-the-token-of-this-run", "of another run": other_run().token}
CONTRACTS = 9


@asynccontextmanager
async def recording(host: str, tls: Tls | None) -> AsyncGenerator[tuple[Recorder, str]]:
    """All contracts at once, on one server made as every service makes its own."""
    recorder, server = Recorder(), rpc.server(token=run().token)
    recorder.add_to(server)
    async with rpc.serving(server, f"{host}:0", tls=tls, grace_s=0.0) as serving:
        yield recorder, serving.address


def test_all_contracts_are_walked() -> None:
    assert len({each.path.split("/")[1] for each in rpcs()}) == CONTRACTS
    assert not [each.path for each in rpcs() if "health" in each.path.lower()]


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
async def test_every_rpc_wants_the_token_of_the_run_on_loopback_too(token: str | None) -> None:
    async with recording("127.0.0.1", None) as (recorder, address):
        async with rpc.plain_channel(address) as channel:
            codes = await refusals(channel, rpcs(), token=token)
        assert codes == {each.path: UNAUTHENTICATED for each in rpcs()}
        assert recorder.reached == []


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
async def test_a_certificate_does_not_replace_the_token(token: str | None) -> None:
    host = beyond_loopback()
    async with recording(host, run().tls_for("learner")) as (recorder, address):
        async with member(address, "learner") as channel:
            codes = await refusals(channel, rpcs(), token=token)
        assert codes == {each.path: UNAUTHENTICATED for each in rpcs()}
        assert recorder.reached == []


@pytest.mark.parametrize("who", outsiders())
@pytest.mark.parametrize("beyond", [False, True], ids=["loopback", "beyond loopback"])
async def test_the_token_does_not_replace_a_certificate(who: str, beyond: bool) -> None:
    host = beyond_loopback() if beyond else "127.0.0.1"
    async with recording(host, run().tls_for("learner")) as (recorder, address):
        async with outsiders()[who](address, "learner") as channel:
            codes = await refusals(channel, rpcs(), token=run().token)
        assert codes == {each.path: UNAVAILABLE for each in rpcs()}
        assert recorder.reached == []


async def test_who_has_both_reaches_every_rpc() -> None:
    host = beyond_loopback()
    async with recording(host, run().tls_for("learner")) as (recorder, address):
        async with member(address, "learner") as channel:
            assert await refusals(channel, rpcs(), token=run().token) == {}
        assert recorder.reached == [each.path for each in rpcs()]


@pytest.mark.parametrize("who", outsiders())
async def test_health_needs_no_token_but_a_certificate(who: str) -> None:
    check = "/grpc.health.v1.Health/Check"
    server = rpc.server(token=run().token)
    async with rpc.serving(
        server, "127.0.0.1:0", tls=run().tls_for("learner"), grace_s=0
    ) as serving:
        async with member(serving.address, "learner") as channel:
            await channel.unary_unary(check)(b"", timeout=5.0)
        async with outsiders()[who](serving.address, "learner") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(check)(b"", timeout=5.0)
    assert caught.value.code() is UNAVAILABLE
