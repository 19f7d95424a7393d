"""Names of the emulator's operations, by which faults are set and requests are counted."""

import json
import re
from typing import Literal

Operation = Literal[
    "environments",
    "regions",
    "account",
    "create",
    "list_instances",
    "get_instance",
    "delete_instance",
    "delete_batch",
    "heartbeat",
    "runs",
    "tasks",
    "check_verifier",
    "execute_verifier",
    "get_verifier",
    "sessions",
    "runner_token",
    "browser",
    "health",
    "resources",
    "describe",
    "query",
    "reset",
    "diff",
    "execute_function",
    "initialize",
    "list_tools",
    "call_tool",
    "mcp_other",
    "other",
]
MCP_OPERATIONS = frozenset({"initialize", "list_tools", "call_tool", "mcp_other"})

_MCP_PATH = re.compile(r"(/browsers)?/(?P<instance>[^/]+)/(?P<endpoint>mcp|api/v1/mcp)")
_RUNNER_PATH = re.compile(r"/(?P<instance>[^/]+)/api/v1/env/")
_CONTROL_PATH = re.compile(r"/v1/env/instances/(?P<instance>[^/]+)")
_RPC: dict[str, Operation] = {
    "initialize": "initialize",
    "tools/list": "list_tools",
    "tools/call": "call_tool",
}
_TABLE: tuple[tuple[str, str, Operation], ...] = (
    ("GET", r"/v1/env/runs", "runs"),
    ("POST", r"/v1/env/instances", "create"),
    ("GET", r"/v1/env/instances", "list_instances"),
    ("DELETE", r"/v1/env/instances/batch", "delete_batch"),
    ("POST", r"/v1/env/instances/[^/]+/heartbeat", "heartbeat"),
    ("GET", r"/v1/env/instances/[^/]+", "get_instance"),
    ("DELETE", r"/v1/env/instances/[^/]+", "delete_instance"),
    ("GET", r"/v1/env/[^/]*", "environments"),
    ("GET", r"/v1/regions", "regions"),
    ("GET", r"/v1/account", "account"),
    ("GET", r"/v1/runner-auth/token", "runner_token"),
    ("*", r"/v1/tasks(/[^/]+)?", "tasks"),
    ("GET", r"/v1/verifiers/check", "check_verifier"),
    ("POST", r"/v1/verifiers/execute", "execute_verifier"),
    ("GET", r"/v1/verifiers/[^/]+", "get_verifier"),
    ("*", r"/v1/(sessions|traces)/.*", "sessions"),
    ("*", r"/v1/browser(/.*)?", "browser"),
    ("GET", r"/[^/]+/api/v1/env/health", "health"),
    ("GET", r"/[^/]+/api/v1/env/resources", "resources"),
    ("GET", r"/[^/]+/api/v1/env/resources/sqlite/[^/]+/describe", "describe"),
    ("POST", r"/[^/]+/api/v1/env/resources/sqlite/[^/]+/query", "query"),
    ("POST", r"/[^/]+/api/v1/env/reset", "reset"),
    ("POST", r"/[^/]+/api/v1/env/diff/(structured|fs)", "diff"),
    ("POST", r"/[^/]+/api/v1/env/execute_verifier_function", "execute_function"),
)
_COMPILED: tuple[tuple[str, re.Pattern[str], Operation], ...] = tuple(
    (method, re.compile(pattern), name) for method, pattern, name in _TABLE
)


def classify_request(method: str, path: str, body: bytes = b"") -> Operation:
    """Name the operation of a request; `body` decides for requests to an MCP address."""
    if mcp_endpoint(path) is not None:
        return _rpc_operation(method, body)
    for wanted, pattern, name in _COMPILED:
        if wanted in ("*", method) and pattern.fullmatch(path):
            return name
    return "other"


def mcp_endpoint(path: str) -> str | None:
    """Return "mcp" or "api/v1/mcp" for a request to such an address of an instance."""
    match = _MCP_PATH.fullmatch(path)
    return match["endpoint"] if match else None


def instance_of(path: str) -> str | None:
    """Return the id of the instance that a request is about."""
    for pattern in (_CONTROL_PATH, _MCP_PATH, _RUNNER_PATH):
        match = pattern.match(path)
        if match:
            return match["instance"]
    return None


def _rpc_operation(method: str, body: bytes) -> Operation:
    if method != "POST":
        return "mcp_other"
    try:
        message = json.loads(body)
    except ValueError:
        return "mcp_other"
    name = message.get("method") if isinstance(message, dict) else None
    return _RPC.get(name, "mcp_other") if isinstance(name, str) else "mcp_other"
