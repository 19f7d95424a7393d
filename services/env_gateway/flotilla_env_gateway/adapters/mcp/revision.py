"""The revision of MCP that a server speaks: how it is found out, and what each request says of it.

Until 2025 a session begins with a handshake, `initialize`. From 2026-07-28 on there is none: every
request names its revision and its client, and `server/discover` tells what a server speaks."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from mcp import ClientSession, MCPError
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    X_MCP_HEADER_KEY,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PROTOCOL_VERSION_META_KEY,
    UNSUPPORTED_PROTOCOL_VERSION,
    DiscoverResult,
    Implementation,
    UnsupportedProtocolVersionErrorData,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_env_gateway.adapters.http_client import HttpError
from flotilla_env_gateway.adapters.mcp.transport import request_until
from flotilla_env_gateway.ports import BackendError

CLIENT = Implementation(name="flotilla-env-gateway", version="0.1")
# A server that does not know `server/discover` may also never answer it.
_ASK_S, _ASK_SHARE = 3.0, 0.25
# Errors and statuses by which a server refuses a request of a revision that it does not speak. It
# has executed nothing.
_OTHER_CODES = {
    UNSUPPORTED_PROTOCOL_VERSION,
    HEADER_MISMATCH,
    METHOD_NOT_FOUND,
    INVALID_REQUEST,
    INVALID_PARAMS,
}
_OTHER_STATUSES = {400, 404, 405, 406, 422}

# Places of a tool's arguments that its server wants in headers too, and the names of these.
Mirrored = Mapping[tuple[str, ...], str]


class ServerRevision:
    """What one configured server speaks, for all sessions with it.

    With `ask` the first session asks it, before any handshake. Without, a server is asked only if
    it refuses the handshake: one that knows both keeps sessions, with an episode's state, only
    after it, and tells nobody else that it has forgotten them or that its tools have changed."""

    def __init__(self, *, ask: bool = False) -> None:
        self._ask = ask
        self._known = not ask
        # What the server said of itself; None for one that wants the handshake.
        self._found: DiscoverResult | None = None
        self._asking = asyncio.Lock()

    async def agree(self, client: ClientSession, until: float) -> bool:
        """Agree on a revision with the server; return True if that is one without a handshake and
        took no request: the server may have been replaced since it was asked.

        Raises MCPError, BackendError, and as `ClientSession.initialize`."""
        async with self._asking:
            asked = not self._known
            if asked:
                self._found = await _discover(client, until)
                self._known = True
        if self._found is not None:
            client.adopt(self._found)
            return not asked
        request_until.set(until)
        try:
            await client.initialize()
        except (MCPError, BackendError) as error:
            refused = _refuses_handshake(error)
            if asked or refused:
                self.forget()
            if not refused or (asked and not _names_versions(error)):
                raise
            found = await _discover(client, until)
            if found is None:
                raise
            self._found, self._known = found, True
        return False

    def forget(self) -> None:
        """Let the next session find out anew."""
        self._found = None
        self._known = not self._ask


def refuses_revision(error: Exception) -> bool:
    """Return True for a refusal that a server may give because it speaks another revision."""
    if isinstance(error, HttpError):
        return error.status in _OTHER_STATUSES
    return isinstance(error, MCPError) and error.code in _OTHER_CODES


def _refuses_handshake(error: Exception) -> bool:
    """Return True if it is a server of MCP that refuses, and not, say, a proxy."""
    by_server = not isinstance(error, HttpError) or '"jsonrpc"' in error.body
    return by_server and refuses_revision(error)


def _names_versions(error: Exception) -> bool:
    return isinstance(error, MCPError) and error.code == UNSUPPORTED_PROTOCOL_VERSION


async def _discover(client: ClientSession, until: float) -> DiscoverResult | None:
    """Ask a server what it speaks; return None for one that gives no such answer, or prefers the
    handshake. Raises BackendError if it was not reached, and if it speaks newer revisions only."""
    timeout_s = min(_ASK_S, _ASK_SHARE * seconds_left(until))
    request_until.set(loop_time() + timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await client.discover()
    except MCPError as error:
        if _names_versions(error):
            _check_versions(error)
    except BackendError as error:
        # The handshake would not reach it either.
        if error.delivered is False and (error.unreachable or error.kind == "throttled"):
            raise
    except (TimeoutError, ValidationError, RuntimeError):
        pass
    return None


def _check_versions(error: MCPError) -> None:
    """Raise BackendError if a server names revisions, and none has a handshake."""
    try:
        named = UnsupportedProtocolVersionErrorData.model_validate(error.data).supported
    except ValidationError:
        return
    if any(each in HANDSHAKE_PROTOCOL_VERSIONS for each in named):
        return
    ours = ", ".join((*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS))
    message = f"the server speaks MCP {', '.join(named)[:200]} only, and the gateway {ours}"
    raise BackendError("protocol", message, delivered=False, invalid=True) from error


def mirrored_arguments(input_schema_json: str) -> Mirrored | None:
    """Return the arguments that a tool's server wants in headers too (x-mcp-header); None if it
    wants that in a way for which MCP forbids to offer the tool."""
    if X_MCP_HEADER_KEY not in input_schema_json:
        return {}
    schema = json.loads(input_schema_json)
    return None if find_invalid_x_mcp_header(schema) else x_mcp_header_map(schema)


def stamp_request(
    version: str, method: str, params: Mapping[str, Any], mirrored: Mapping[str, Mirrored]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters of a request without a session, and its headers, from which proxies
    can tell what it is. Raises BackendError for text that no header can hold."""
    # https://modelcontextprotocol.io/specification/2026-07-28/basic/transports/streamable-http
    meta = {
        PROTOCOL_VERSION_META_KEY: version,
        CLIENT_INFO_META_KEY: {"name": CLIENT.name, "version": CLIENT.version},
        CLIENT_CAPABILITIES_META_KEY: {},
    }
    headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: method}
    if method == "tools/call":
        name = params["name"]
        try:
            headers[MCP_NAME_HEADER] = encode_header_value(name)
            headers |= mcp_param_headers(mirrored.get(name, {}), params["arguments"])
        except UnicodeEncodeError as error:
            why = f"no text of Unicode: {error}"
            raise BackendError("arguments", why, delivered=False, bad_arguments=True) from error
    return {**params, "_meta": meta}, headers
