"""Serve the environments over HTTP.

    flotilla env serve --port 0

Prints one line of JSON, {"url": "http://127.0.0.1:PORT"}, once it serves. It speaks Fleet's
instance wire (POST /v1/env/instances with env_key and data_key creates an instance) and MCP at
{root}mcp, where root is the instance's `urls.root`. SIGTERM closes every instance and exits with 0.

    flotilla env serve booking --openenv

serves one environment to OpenEnv clients at the URL itself, or several at URL/ENV each. `reset`
takes task_key, data_id, split and index, or seed; the tool submit_final_answer ends an episode, and
its reward is the verifier's verdict.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from starlette.types import ASGIApp

from flotilla_environments.api import ALL_KEYS, ENV_KEYS
from flotilla_environments.openenv.launch import NotInstalledError, ensure_openenv
from flotilla_environments.server.http_process import (
    HOST_HEADERS,
    TOKEN_VARIABLE,
    add_options,
    open_listener,
    serve_app,
)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flotilla env serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"With {TOKEN_VARIABLE} in the environment, every request must bring it as "
        "'Authorization: Bearer TOKEN'.",
    )
    add_options(parser)
    parser.add_argument("envs", nargs="*", metavar="ENV", help="the same as --env ENV")
    parser.add_argument(
        "--env",
        action="append",
        choices=ALL_KEYS,
        help="environment to serve; may be repeated (default: all)",
    )
    parser.add_argument(
        "--max-instances",
        type=int,
        default=4096,
        help="instances at once; with --openenv sessions, of each environment (default 4096)",
    )
    parser.add_argument(
        "--openenv",
        action="store_true",
        help="speak OpenEnv's protocol; needs the environment that `make openenv` creates",
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="with --openenv: end a session that is idle for longer (default 1800)",
    )
    return parser


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.max_instances < 1:
        parser.error("--max-instances must be at least 1")
    if not 0 < options.session_timeout < 10**9:
        parser.error("--session-timeout must be more than 0")
    # Single-turn environments have no tools, by which OpenEnv's actions are given.
    offered = ENV_KEYS if options.openenv else ALL_KEYS
    chosen = tuple(dict.fromkeys([*options.envs, *(options.env or [])]))
    if unknown := [env for env in chosen if env not in offered]:
        parser.error(f"environment {unknown[0]!r} is not one of {', '.join(offered)}")
    options.env_keys = chosen or offered


# Each application needs another version of mcp, so that only one of the two can be imported.
def _fleet_app(options: argparse.Namespace) -> ASGIApp:
    from flotilla_environments.server.app import build_app
    from flotilla_environments.server.instance_registry import Registry

    return build_app(
        Registry(options.max_instances),
        options.env_keys,
        hosts=list(HOST_HEADERS),
        token=os.environ.get(TOKEN_VARIABLE),
    )


def _openenv_app(options: argparse.Namespace) -> ASGIApp:
    from flotilla_environments.openenv.app import build_app

    return build_app(
        options.env_keys,
        max_sessions=options.max_instances,
        session_timeout_s=options.session_timeout,
        hosts=HOST_HEADERS,
        token=os.environ.get(TOKEN_VARIABLE),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    parent = os.getppid()
    arguments = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(arguments)
    _check_options(parser, options)
    if options.openenv:
        try:
            ensure_openenv(arguments)
        except NotInstalledError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    try:
        listener = open_listener(options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    app = (_openenv_app if options.openenv else _fleet_app)(options)
    asyncio.run(serve_app(app, listener, parent=parent if options.die_with_parent else None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
