"""Rings between nodes, each an echo of its own: those that close, and those that do not."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from services.common.process.arguments import TOKEN_VARIABLE
from services.common.rpc import rpc
from services.common.rpc.tls import TLS_VARIABLE
from services.launcher.doctor import ring
from services.launcher.doctor.echo_server import METHOD, RING, SERVICE
from services.launcher.doctor.findings import Status
from services.launcher.doctor.network_check import listen_on
from services.launcher.doctor.node_echo import NO_TOKEN, probe_echo
from services.launcher.doctor.ring_rank import (
    RankAssignment,
    RankOutcome,
    parse_assignment,
    run_rank,
)
from services.launcher.doctor.run_context import RunContext
from services.launcher.security.certificates import mint_identity
from tests.support.doctor import TOKEN, check, echo_of, probed, service_forge, spec, subject
from tests.support.process_forge import ProcessForge
from tests.support.repository import ROOT
from tests.support.waiting import until

# Another machine's address: this one has all of 127.0.0.0/8.
THERE = "127.0.0.2:0"
GIVEN = {TOKEN_VARIABLE: TOKEN}
Ring = Callable[[bytes, Any], Awaitable[bytes]]


@pytest.fixture
def about(policy: Path, tasks: Path, tmp_path: Path, rank_forge: ProcessForge) -> RunContext:
    return replace(subject(spec(policy, tasks), tmp_path, **GIVEN), python=rank_forge.interpreter)


@asynccontextmanager
async def node_with(**methods: Ring) -> AsyncGenerator[str]:
    """The address of a node that answers as these do."""
    server = rpc.server(token=TOKEN)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, bytes, bytes)
        for name, method in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    async with rpc.serving(server, THERE, grace_s=0.1) as at:
        yield at.address


async def same(request: bytes, _: Any) -> bytes:
    return request


def shut() -> socket.socket:
    """Holds a port without listening on it."""
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    return door


def ranks() -> list[str]:
    """Ranks that this process, or an echo of it, has started."""
    return [line for each in psutil.Process().children(recursive=True) if (line := rank(each))]


def rank(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or one that only its parent still knows
        return ""
    return line if "ring_probe" in line else ""


async def test_a_ring_goes_through_a_rank_here_and_one_on_each_node(
    about: RunContext, rank_forge: ProcessForge
) -> None:
    run = mint_identity("ours")
    secret = {**GIVEN, TLS_VARIABLE: run.tls_for("learner").to_text()}
    with (
        echo_of(THERE, rank_forge, **secret) as one,
        echo_of("127.0.0.3:0", rank_forge, **secret) as other,
    ):
        named = replace(about, nodes=(one, other), tls=run.tls_for("rollout"))
        result = await probed("ring", named)
    check(result, Status.OK, f"gloo ring of 3 processes, here and on {one}, {other}, passed")
    assert not ranks()


@pytest.mark.slow
async def test_a_node_that_does_not_reach_the_first_rank_is_named(
    about: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shut() as closed, echo_of(THERE, **GIVEN) as at:
        port = closed.getsockname()[1]

        class Elsewhere(socket.socket):
            """Listens behind a firewall: no connection reaches the port that it names."""

            def getsockname(self) -> tuple[str, int]:
                return ("127.0.0.1", port)

        monkeypatch.setattr(
            ring, "listen_on", lambda host: Elsewhere(fileno=listen_on(host).detach())
        )
        # Rank 0 fails as well: it must not start sooner than the node's.
        slow = Path(sys.executable)
        result = await probed("ring", replace(about, nodes=(at,), python=slow))
    wrong = f"rank 1 on {at}: cannot reach rank 0 at 127.0.0.1 port {port} (Connection refused)"
    check(result, Status.FAIL, wrong, "let all TCP ports through", "GLOO_SOCKET_IFNAME", "lo")
    check(result, Status.FAIL, "through a tunnel no ring is made")
    assert not ranks()


@pytest.mark.slow
async def test_two_nodes_that_do_not_reach_each_other_are_named(about: RunContext) -> None:
    with shut() as closed:
        port = closed.getsockname()[1]

        async def behind_a_firewall(request: bytes, _: Any) -> bytes:
            await asyncio.to_thread(meet, parse_assignment(request), port)
            await asyncio.sleep(60)
            return b""

        async with node_with(**{RING: behind_a_firewall}) as hidden:
            with echo_of(THERE, **GIVEN) as at:
                result = await probed("ring", replace(about, nodes=(at, hidden)))
    reason = f"cannot reach rank 2 at 127.0.0.1 port {port} (Connection refused)"
    check(result, Status.FAIL, f"gloo ring of 3 of rank 0 here, rank 1 on {at}, rank 2 on {hidden}")
    message = (f"rank 0 here: {reason}", f"rank 1 on {at}: {reason}")
    assert any(each in result.detail for each in message), result.detail


def meet(seat: RankAssignment, port: int) -> None:
    """Send a port to the other ranks, as a rank does."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(seat.host, seat.port, is_master=False)
    fact = f'{{"host": "127.0.0.1", "port": {port}, "gpu": false}}'
    store.set(f"rank {seat.rank}", fact)
    store.set(f"checked {seat.rank}", "")


async def test_an_interface_that_gloo_does_not_find_is_named(
    about: RunContext,
) -> None:
    environ = {**about.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    result = await probed("ring", replace(about, environ=environ))
    check(result, Status.FAIL, "gloo ring of 2", "GLOO_SOCKET_IFNAME is 'nowhere0'", "lo")


@pytest.mark.slow
async def test_an_interface_that_is_not_on_a_node_is_named_with_the_node(about: RunContext) -> None:
    with echo_of(THERE, **GIVEN, GLOO_SOCKET_IFNAME="nowhere0") as at:
        result = await probed("ring", replace(about, nodes=(at,)))
    check(result, Status.FAIL, f"gloo ring of 2: rank 1 on {at}: ", "is 'nowhere0'")


async def test_another_version_of_torch_is_named_by_both_nodes(
    about: RunContext, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '1.0'\ndef set_num_threads(n): ...")
    failing = "class TCPStore:\n def __init__(self, *_, **__): raise RuntimeError('what is that?')"
    (tmp_path / "torch/distributed.py").write_text(failing)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "gen")])
    with echo_of(THERE, **GIVEN, PYTHONPATH=path) as at:
        result = await probed("ring", replace(about, nodes=(at,)))
    check(result, Status.FAIL, f"rank 1 on {at}: what is that?", f"rank 1 on {at} has 1.0")
    check(result, Status.FAIL, "versions of torch differ: rank 0 here has 2.")


async def test_a_node_with_an_echo_from_before_rings_is_named(about: RunContext) -> None:
    async with node_with(**{METHOD: same}) as at:
        result = await probed("ring", replace(about, nodes=(at,)))
    check(result, Status.FAIL, f"{at} is no echo, or one of an older version", "start the echo")
    assert not ranks()


async def test_a_node_with_another_token_is_named(about: RunContext) -> None:
    token = {TOKEN_VARIABLE: "another-token-that-is-long-enough"}
    with echo_of(THERE, service_forge(), **token) as at:
        result = await probed("ring", replace(about, nodes=(at,)))
    check(result, Status.FAIL, at, "UNAUTHENTICATED", "with the same FLOTILLA_TOKEN")
    assert not ranks()


async def test_no_node_is_called_without_a_token(about: RunContext) -> None:
    without = replace(about, nodes=("127.0.0.2:1",), environ={})
    assert await ring.probe_ring(without) == await probe_echo(without) == [NO_TOKEN]


async def test_a_node_takes_a_seat_only_with_the_token_and_ends_it_with_the_call() -> None:
    with listen_on("127.0.0.1") as door, echo_of(THERE, **GIVEN) as at:
        seat = RankAssignment(1, 2, "127.0.0.1", door.getsockname()[1]).to_bytes()
        async with rpc.channel(at, token="another-token-that-is-long-enough") as channel:
            with pytest.raises(grpc.RpcError, match="not that of this run"):
                await channel.unary_unary(f"/{SERVICE}/{RING}")(seat, timeout=5.0)
        assert not ranks()
        async with rpc.channel(at, token=TOKEN) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/{RING}")(seat, timeout=30.0)
            waiting = asyncio.ensure_future(call)
            await until(lambda: len(ranks()) > 0)
            call.cancel()
            await until(lambda: not ranks())
            waiting.cancel()


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{}",
        b'{"rank": 0, "world": 2, "host": "127.0.0.1", "port": 1}',
        b'{"rank": 2, "world": 2, "host": "127.0.0.1", "port": 1}',
        b'{"rank": 1, "world": 2, "host": "learner.example", "port": 1}',
        b'{"rank": 1, "world": 2, "host": "127.0.0.1", "port": 65536}',
        b'{"rank": 1, "world": 2, "host": "127.0.0.1", "port": 1, "listener": 3}',
        b'{"rank": "1", "world": 2, "host": "127.0.0.1", "port": 1}',
    ],
)
def test_what_is_no_seat_of_another_machine_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_assignment(text)


async def test_a_rank_is_not_given_the_token(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf \'{"how": "%s"}\\n\' "$HOME has [$FLOTILLA_TOKEN]"\n')
    python.chmod(0o700)
    environ = {**GIVEN, "HOME": "one"}
    assert await run_rank(
        str(python), RankAssignment(0, 2, "127.0.0.1", 1), environ
    ) == RankOutcome(how="one has []")
