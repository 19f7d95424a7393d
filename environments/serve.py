"""Serve the environments over HTTP.

    python -m environments.serve --port 0

Prints one line of JSON, {"url": "http://127.0.0.1:PORT"}, once it serves. It speaks Fleet's
instance wire (POST /v1/env/instances with env_key and data_key creates an instance) and MCP at
{root}mcp, where root is the instance's `urls.root`. SIGTERM closes every instance and exits with 0.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from environments.api import ALL_KEYS
from environments.server.app import build_app
from environments.server.registry import Registry
from environments.server.serving import HOST_HEADERS, TOKEN_VARIABLE, add_options, listen, serve


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m environments.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"With {TOKEN_VARIABLE} in the environment, every request must bring it as "
        "'Authorization: Bearer TOKEN'.",
    )
    add_options(parser)
    parser.add_argument(
        "--env",
        action="append",
        choices=ALL_KEYS,
        help="environment to serve; may be repeated (default: all)",
    )
    parser.add_argument(
        "--max-instances", type=int, default=4096, help="instances at once (default 4096)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    parent = os.getppid()
    options = parser.parse_args(argv)
    if options.max_instances < 1:
        parser.error("--max-instances must be at least 1")
    try:
        listener = listen(options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    app = build_app(
        Registry(options.max_instances),
        tuple(options.env or ALL_KEYS),
        hosts=list(HOST_HEADERS),
        token=os.environ.get(TOKEN_VARIABLE),
    )
    asyncio.run(serve(app, listener, parent=parent if options.die_with_parent else None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
