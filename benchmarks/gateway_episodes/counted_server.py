"""The environments of this repository over HTTP, writing each tool call that arrives to a file."""

import argparse
import asyncio
import json
import os
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla_environments.api import ENV_KEYS
from flotilla_environments.server.app import build_app
from flotilla_environments.server.http_process import (
    HOST_HEADERS,
    add_options,
    open_listener,
    serve_app,
)
from flotilla_environments.server.instance_registry import Registry


class CountedCalls:
    """ASGI middleware that writes a line for each tool call: instance, tool and arguments."""

    def __init__(self, app: ASGIApp, ledger: Path) -> None:
        self._app = app
        self._ledger = ledger.open("a")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/mcp"):
            return await self._app(scope, receive, send)
        body = await Request(scope, receive).body()
        asked = json.loads(body)
        if asked.get("method") == "tools/call":
            params = asked["params"]
            line = [scope["path"], params["name"], params.get("arguments")]
            print(json.dumps(line, sort_keys=True), file=self._ledger, flush=True)
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        return await self._app(scope, receive_again, send)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("ledger", type=Path)
    options = parser.parse_args()
    listener = open_listener(options.host, options.port)
    app = build_app(Registry(4096), ENV_KEYS, hosts=list(HOST_HEADERS), token=None)
    asyncio.run(serve_app(CountedCalls(app, options.ledger), listener, parent=os.getppid()))


if __name__ == "__main__":
    main()
