"""Probe of TCP ports: those to listen on are free, those to reach are reachable."""

import asyncio
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from flotilla_launcher.config.backend_tables import backend_tables
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok, warn
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import GATEWAY, LEARNER

_CONNECT_S = 5.0
_LOOPBACK = "127.0.0.1"


async def probe_ports(context: RunContext) -> list[Finding]:
    taken = [
        finding for what, port in _list_fixed_ports(context) if (finding := _check_free(what, port))
    ]
    advertised = await _check_advertised(context)
    problems = [*taken, *advertised]
    if problems:
        return problems
    fixed = ", ".join(f"{port} ({what})" for what, port in _list_fixed_ports(context))
    return [ok(f"free: {fixed}" if fixed else "nothing is bound to a fixed port")]


def _list_fixed_ports(context: RunContext) -> Iterator[tuple[str, int]]:
    sky = context.plan.config.sky
    if context.backend == "sky":
        if sky.registry_port:
            yield "launcher.sky.registry_port", sky.registry_port
        return
    section: Any = context.sections.get(GATEWAY, {})
    for key, server in list_started(section, used_backends(context)):
        for option, value in pairwise(server["command"]):
            if option == "--port" and value.isdecimal() and int(value):
                yield f"{key}.command", int(value)
    # Port of WeightService; 0 is any.
    if port := context.sections.get(LEARNER, {}).get("weights", {}).get("port"):
        yield "learner.weights.port", port


def list_started(
    section: Mapping[str, Any], backends: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the servers of backends that the gateway starts, each with its key in the spec."""
    for name in sorted(backends):
        tables = backend_tables(section, name).items()
        yield from ((key, table) for key, table in tables if table.get("command"))


def used_backends(context: RunContext) -> set[str]:
    """Return the backends that the gateway's environments use; none if that is not known."""
    section = context.sections.get(GATEWAY)
    if section is None:
        return set()
    own = {e["backend"] for e in section["environments"].values() if e["backend"]}
    return {section["backend"], *own}


def _check_free(what: str, port: int) -> Finding | None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0" if what.startswith("launcher.sky") else _LOOPBACK, port))
        except OSError as error:
            fix = f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or change {what}"
            return fail(f"port {port} cannot be had: {error.strerror}", fix)
    return None


async def _check_advertised(context: RunContext) -> list[Finding]:
    """Check that a connection to the advertised address arrives at this machine."""
    sky = context.plan.config.sky
    if context.backend != "sky" or sky.advertise is None:
        return []
    word = secrets.token_bytes(16)

    async def send_word(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word)
        await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(send_word, "0.0.0.0", sky.registry_port)
    except OSError:
        # Another finding reports that the port is taken.
        return []
    async with server:
        port = server.sockets[0].getsockname()[1]
        heard = await _read_greeting(sky.advertise, port, len(word))
    if heard == word:
        return []
    fix = (
        "set launcher.sky.advertise to an address of this machine that the others reach, and open"
        " the port"
    )
    where = f"launcher.sky.advertise {sky.advertise}:{port}"
    if isinstance(heard, bytes):
        return [fail(f"{where} is another machine's", fix)]
    # Many clouds let no machine reach itself by its public address.
    away = "from here" if sky.network == "private" else "from here, as on clouds without hairpins"
    judge = fail if sky.network == "private" or isinstance(heard, socket.gaierror) else warn
    return [judge(f"{where} cannot be reached {away}: {heard or 'no answer'}", fix)]


async def _read_greeting(host: str, port: int, size: int) -> bytes | OSError:
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.read(size)
            finally:
                writer.close()
    except TimeoutError:
        return TimeoutError(f"no answer in {_CONNECT_S:g} s")
    except OSError as error:
        return error


async def probe_webhook(context: RunContext) -> list[Finding]:
    """Check that the webhook's host accepts a connection; nothing is posted."""
    variable = context.plan.config.notify.webhook_env
    if variable is None:
        raise NotApplicableError("there is no webhook")
    url = urlsplit(context.environ.get(variable, ""))
    if url.scheme not in ("http", "https") or not url.hostname:
        fix = f"export {variable}=https://..., or take launcher.notify.webhook_env out"
        return [fail(f"{variable} is not set to a URL", fix)]
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        return [fail(f"{variable} has a port that is none", "write https://host:port/path")]
    heard = await _read_greeting(url.hostname, port, 0)
    if isinstance(heard, OSError):
        what = f"{url.hostname}:{port} of {variable} cannot be reached: {heard}"
        return [fail(what, "correct the URL, or check that its server runs")]
    return [ok(f"{url.hostname}:{port} takes connections")]
