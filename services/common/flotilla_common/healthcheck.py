"""Health check of a service, for container engines:

    python -m flotilla_common.healthcheck --address 127.0.0.1:50051

Exit codes: 0 it serves, 1 it does not, or not yet, 2 the arguments are wrong. Under TLS the command
presents the service's own certificate, which only processes beside the service have."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.rpc import plain_channel
from flotilla_common.rpc.tls import TLS_VARIABLE, Tls, likely_cause, read_tls
from flotilla_common.text.printable_text import print_visible

SERVING, NOT_SERVING, WRONG = 0, 1, 2
PORT = 50051


async def check_health(address: str, tls: Tls | None, timeout_s: float, *, peer: str = "") -> str:
    """Return why the service does not serve; empty if it does.

    `peer` names the service in the expected certificate, if that is not `tls`. Raises
    ConfigError."""
    own = tls.name.partition(".")[0] if tls is not None else ""
    async with plain_channel(address, wait_for_ready=False, tls=tls, peer=peer or own) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return likely_cause(error.details()) or f"{error.code().name}: {error.details()}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"its status is {status}"


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    folder = given.tls_dir if given.tls_dir and given.tls_dir.exists() else None
    try:
        return report_health(given.address, read_tls(folder), given.timeout)
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return WRONG


def report_health(address: str, tls: Tls | None, timeout_s: float, *, peer: str = "") -> int:
    """Run `check_health`, print the result and return the exit code."""
    reason = asyncio.run(check_health(address, tls, timeout_s, peer=peer))
    print_visible(f"{address}: {reason or 'serving'}")
    return NOT_SERVING if reason else SERVING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_common.healthcheck",
        description="Check whether a service serves. Exit code: 0 yes, 1 no, 2 wrong arguments.",
    )
    add = parser.add_argument
    add("--address", default=f"127.0.0.1:{PORT}", metavar="HOST:PORT", help="(%(default)s)")
    add("--tls-dir", type=Path, help=f"the service's --tls-dir, if it has one (or ${TLS_VARIABLE})")
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
