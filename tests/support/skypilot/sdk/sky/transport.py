"""Questions to the server, by HTTP."""

import json
import os
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

from sky import exceptions

_TIMEOUT_S = 60.0
_UNAVAILABLE = 503
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    server = os.environ["SKYPILOT_API_SERVER_ENDPOINT"]
    request = urllib.request.Request(f"{server}/{path}", json.dumps(body).encode())
    try:
        with _opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            text = f"Failed to get request: {error.code}"
        if error.code == _UNAVAILABLE:
            raise exceptions.ServerTemporarilyUnavailableError(text) from error
        raise RuntimeError(text) from error
    except (OSError, ValueError) as error:
        raise exceptions.ApiServerConnectionError(server) from error


def submit(method: str, **arguments: Any) -> str:
    """The number of the request, which the server deals with in its own time."""
    return post("submit", {"method": method, "arguments": arguments})["request"]


def parsed(kind: str, value: Any) -> Any:
    """Return a value in the shape of SkyPilot's own types."""
    match kind:
        case "clusters":
            return [_record(each) for each in value]
        case "statuses":
            return {number: _named(status) for number, status in value.items()}
        case "launched":
            return value, None
        case _:
            return value


def _record(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**fields, "status": _named(fields["status"]), "handle": None})


def _named(status: str | None) -> SimpleNamespace | None:
    return SimpleNamespace(value=status) if status is not None else None
