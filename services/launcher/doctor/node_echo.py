"""Probe of gRPC between the nodes of a run: with its largest messages, and its TLS."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio

from services.common.files.scratch_folders import scratch_folder
from services.common.process.arguments import TOKEN_VARIABLE
from services.common.process.line_channel import ChildLostError, LineChannel
from services.common.process.python_command import python_command
from services.common.rpc import rpc
from services.common.rpc.errors import ConfigError
from services.common.rpc.tls import TLS_VARIABLE, Tls, likely_cause
from services.launcher.doctor.echo_server import METHOD, SERVICE
from services.launcher.doctor.findings import Finding, fail, last_line, ok
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT

# Size of the largest messages of the contracts.
_MESSAGE = bytes(2**20)
_CALL_S = 8.0
# Services that are called; rollouts only call.
_SERVERS = (GATEWAY, LEARNER)
_FIREWALL_FIX = "check that it runs, and that firewalls let its port through"
IDENTITY_FIX = "start both sides with the same FLOTILLA_TOKEN, and with --tls-dir of the same run"
NO_TOKEN = fail(
    f"{TOKEN_VARIABLE} is not set", f"export the {TOKEN_VARIABLE} that the nodes were started with"
)
_OLD_VERSION_FIX = "restart the echo there with this version"


async def probe_echo(context: RunContext) -> list[Finding]:
    if context.nodes:
        token = context.environ.get(TOKEN_VARIABLE, "")
        if not token:
            return [NO_TOKEN]
        calls = [_call_echo(node, LEARNER, token, context.tls) for node in context.nodes]
        return list(await asyncio.gather(*calls))
    return await _call_own_echoes(context)


async def _call_own_echoes(context: RunContext) -> list[Finding]:
    """Call echo processes that stand in for gateway and learner, as a rollout would."""
    token = secrets.token_urlsafe(32)
    members: dict[str, Tls] = {}
    if context.backend != "local":
        from services.launcher.security.certificates import mint_identity

        members = dict(mint_identity("doctor").members)
    async with AsyncExitStack() as stack:
        servers = [_serve_echo(context, token, members.get(service)) for service in _SERVERS]
        try:
            addresses = [await stack.enter_async_context(server) for server in servers]
        except ConfigError as error:
            return [fail(str(error), "check that processes of this machine may listen")]
        caller = members.get(ROLLOUT)
        pairs = zip(addresses, _SERVERS, strict=True)
        return list(
            await asyncio.gather(*(_call_echo(at, service, token, caller) for at, service in pairs))
        )


@asynccontextmanager
async def _serve_echo(context: RunContext, token: str, tls: Tls | None) -> AsyncGenerator[str]:
    """Run an echo in a process of its own and yield its address. Raises ConfigError."""
    secret = {TOKEN_VARIABLE: token, **({TLS_VARIABLE: tls.to_text()} if tls else {})}
    command = python_command("-m", "services.launcher.doctor.echo_server", "--until-eof")
    with scratch_folder() as (folder, _):
        echo = await LineChannel.start_child(
            "an echo", command, folder / "echo.log", environ=context.environ, more=secret
        )
        try:
            line = await echo.read_line()
            yield json.loads(line)["address"]
        except ChildLostError as error:
            raise ConfigError(last_line(str(error))) from error
        finally:
            await echo.close()


async def _call_echo(address: str, service: str, token: str, tls: Tls | None) -> Finding:
    try:
        async with rpc.channel(
            address, token=token, tls=tls, peer=service, wait_for_ready=False
        ) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
            answer = await call(_MESSAGE, timeout=_CALL_S)
    except ConfigError as error:
        return fail(f"{address}: {error}", IDENTITY_FIX)
    except grpc.aio.AioRpcError as error:
        return explain_refusal(address, error)
    if answer != _MESSAGE:
        return fail(f"{address} gave back something else", "see what listens there")
    return ok(f"{address} gave {len(_MESSAGE)} bytes back {'under TLS' if tls else 'in clear'}")


def explain_refusal(address: str, error: grpc.aio.AioRpcError) -> Finding:
    """Explain why a node's echo does not answer."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return fail(f"{address} is no echo, or one of an older version", _OLD_VERSION_FIX)
    reason = likely_cause(error.details()) or f"{error.code().name}: {error.details()}"
    stranger = error.code() is grpc.StatusCode.UNAUTHENTICATED or "certificate" in reason
    return fail(f"{address} does not answer: {reason}", IDENTITY_FIX if stranger else _FIREWALL_FIX)
