"""An emulator of Fleet, for tests and training without the service.

    flotilla emulator --port 8900

It prints {"url": "http://127.0.0.1:8900"} once it serves. Fleet's own Python SDK, unmodified, uses
it when two variables are set:

    export FLEET_BASE_URL=http://127.0.0.1:8900 FLEET_API_KEY=anything
    python -c 'import fleet; print(fleet.Fleet().list_envs())'
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla_environments.api import ALL_KEYS, ENV_KEYS
from flotilla_environments.fleet_emulator.app import Options, build_app
from flotilla_environments.server.http_process import (
    TOKEN_VARIABLE,
    add_options,
    open_listener,
    serve_app,
)
from flotilla_environments.tasks import TaskError, load_tasks, make_tasks

DEFAULT_TASKS = 100
_EPILOG = f"""\
addresses
  control plane    {{url}}/v1/...           Authorization: Bearer KEY, where any key will do
  instance runner  {{root}}api/v1/env/...   root is the instance's urls.root
  its tools        {{root}}mcp              MCP over streamable HTTP
  aggregator       {{root}}api/v1/mcp       the same tools and `computer`

injected faults, and counters of requests
  GET    {{url}}/_emulator/counters
  POST   {{url}}/_emulator/faults  {{"faults": [{{"on": ["create"], "rate": 0.5}}], "seed": 7}}
  POST   {{url}}/_emulator/faults  {{"mcp_warmup": 5, "instance_limit": 10}}
  DELETE {{url}}/_emulator/faults
  POST   {{url}}/_emulator/kill    {{"instance_id": "i..."}}

With {TOKEN_VARIABLE} in the environment that key is required on every request, including these,
and the instance runner requires it as X-Runner-Token. Verifiers run with the rights of the user who
starts the emulator, in separate processes but without a sandbox: serve only tasks that you trust.
"""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flotilla emulator",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    add = parser.add_argument
    add(
        "--env",
        action="append",
        choices=ALL_KEYS,
        help="environment to serve; may be repeated (default: all)",
    )
    add(
        "--tasks",
        type=Path,
        metavar="FILE",
        help="task file to serve, as `flotilla tasks` writes it "
        f"(default: the first {DEFAULT_TASKS} training tasks)",
    )
    add("--instance-limit", type=int, default=4096, help="instances at once (default 4096)")
    add(
        "--mcp-sessions",
        action="store_true",
        help="keep MCP sessions and answer in event streams (default: no sessions, plain JSON)",
    )
    add(
        "--speed",
        type=float,
        default=1.0,
        help="how fast TTLs and heartbeat intervals run out, to test what follows (default 1)",
    )
    _add_verifier_options(parser)
    return parser


def _add_verifier_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--run-verifiers-for",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest execution of a verifier, which is killed then (default 60)",
    )
    add("--verifier-workers", type=int, default=2, help="verifiers executed at once (default 2)")
    add(
        "--verifiers",
        choices=("snapshots", "http"),
        default="snapshots",
        help="what a verifier's queries read: copies of the instance's databases, or the instance "
        "runner over HTTP, as at Fleet and at twice the cost (default snapshots)",
    )


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("instance_limit", "run_verifiers_for", "verifier_workers", "speed"):
        if not 0 < getattr(options, name) < 10**6:
            parser.error(f"--{name.replace('_', '-')} must be more than 0 and less than a million")


def _tasks_to_serve(options: argparse.Namespace, env_keys: Sequence[str]) -> list[dict[str, Any]]:
    """Load or generate the tasks. Raises `TaskError` or `OSError`."""
    if options.tasks is not None:
        return load_tasks(options.tasks)
    generated = [key for key in env_keys if key in ENV_KEYS]
    return list(make_tasks(generated, "train", DEFAULT_TASKS)) if generated else []


def _build_options(options: argparse.Namespace) -> Options:
    env_keys = tuple(options.env or ALL_KEYS)
    return Options(
        env_keys=env_keys,
        tasks=_tasks_to_serve(options, env_keys),
        key=os.environ.get(TOKEN_VARIABLE),
        instance_limit=options.instance_limit,
        verifier_workers=options.verifier_workers,
        verifier_seconds=options.run_verifiers_for,
        verifiers_over_http=options.verifiers == "http",
        mcp_sessions=options.mcp_sessions,
        speed=options.speed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    parent = os.getppid()
    options = parser.parse_args(argv)
    _check_options(parser, options)
    try:
        app = build_app(_build_options(options))
    except (TaskError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        listener = open_listener(options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    asyncio.run(serve_app(app, listener, parent=parent if options.die_with_parent else None))
    return 0
