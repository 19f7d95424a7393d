"""An emulator of Fleet in a process of its own, and the real SDK."""

import base64
import importlib
import inspect
import io
import json
import os
import pickle
import subprocess
import warnings
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from flotilla_environments.reference_policies import plan_calls
from tests.support.environment_processes import environment_command
from tests.support.started_process import end_process, start_process

with warnings.catch_warnings():
    # The SDK declares its models in pydantic's old way.
    warnings.simplefilter("ignore", DeprecationWarning)
    import fleet as sdk

# The asynchronous half has exceptions of its own, under the same names.
ERRORS: tuple[type[Exception], ...] = (
    sdk.FleetError,
    importlib.import_module("fleet._async.exceptions").FleetError,
)

__all__ = [
    "ERRORS",
    "call_tool",
    "created",
    "emulating",
    "execute",
    "execution",
    "rpc",
    "sdk",
    "settled",
    "solve",
]


@contextmanager
def emulating(*options: str, **variables: str) -> Generator[str]:
    """The emulator's address; its standard error must stay empty."""
    process, line = start_process(
        environment_command("-m", "flotilla_environments.fleet_emulator", *options),
        stderr=subprocess.PIPE,
        env=os.environ | variables,
    )
    try:
        yield json.loads(line)["url"]
    finally:
        errors = end_process(process)
    assert (process.returncode, errors) == (0, "")


async def settled(value: Any) -> Any:
    """Return the answer to a call of either SDK: the asynchronous one's has to be awaited."""
    return await value if inspect.isawaitable(value) else value


def created(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    body = {"env_key": "tracker", "data_key": "train-000001", "run_id": "test"} | changes
    response = http.post("/v1/env/instances", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def call_tool(
    http: httpx.Client, root: str, name: str, arguments: Any, endpoint: str = "mcp"
) -> httpx.Response:
    return rpc(http, f"{root}{endpoint}", "tools/call", {"name": name, "arguments": arguments})


def rpc(http: httpx.Client, url: str, method: str, params: Any = None) -> httpx.Response:
    """One exchange with an MCP address."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    headers = {"accept": "application/json, text/event-stream"}
    return http.post(url, json=message, headers=headers)


def solve(
    root: str, env_key: str, data_key: str, endpoints: Sequence[str] = ("mcp",), key: str = "any"
) -> None:
    """Make the calls that solve a task, alternating between the endpoints."""
    with httpx.Client(headers={"authorization": f"Bearer {key}"}) as http:
        calls = plan_calls({"env_id": env_key, "data_id": data_key})
        for index, (name, arguments) in enumerate(calls):
            endpoint = endpoints[index % len(endpoints)]
            reply = call_tool(http, root, name, arguments, endpoint)
            assert reply.json()["result"].get("isError") is not True, reply.text


def _bundle(code: str) -> str:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("verifier.py", code)
    return base64.b64encode(archive.getvalue()).decode()


def execution(instance_id: str, code: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A request to execute `verify` of some code, as the SDK makes it."""
    env = {"env": instance_id}
    pickled = pickle.dumps({"args": (None, *args, env), "kwargs": kwargs})
    return {
        "key": "k",
        "sha256": "s",
        "bundle": _bundle(code),
        "args": base64.b64encode(pickled).decode(),
        "args_array": [*args, env],
        "function_name": "verify",
    }


def execute(http: httpx.Client, instance_id: str, code: str, *args: Any, **kwargs: Any) -> Any:
    body = execution(instance_id, code, *args, **kwargs)
    response = http.post("/v1/verifiers/execute", json=body)
    assert response.status_code == 200, response.text
    return response.json()
