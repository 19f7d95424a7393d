"""Echo over gRPC as every service speaks it, which can also take part in a ring.

The doctor starts some on this machine. To test the connection to another machine, start one
there by hand, `python -m services.launcher.doctor.echo_server --listen HOST:PORT --tls-dir
DIR` with the token in FLOTILLA_TOKEN and the interpreter of the services, and name it here:
`flotilla doctor SPEC --node HOST:PORT --tls-dir DIR`. The doctor's machine is part of the
ring too, and the nodes must reach it: run the doctor on one of them if possible."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import grpc

from services.common.process.arguments import read_token
from services.common.process.stop_signals import StopSignals
from services.common.rpc import rpc
from services.common.rpc.errors import ConfigError
from services.common.rpc.tls import Tls, read_tls
from services.common.text.printable_text import print_json, print_visible
from services.launcher.doctor.ring_rank import (
    RankAssignment,
    RankOutcome,
    parse_assignment,
    run_rank,
)

SERVICE, METHOD, RING = "flotilla.Doctor", "Echo", "Ring"
_GRACE_S = 0.2


async def _echo_bytes(request: bytes, context: Any) -> bytes:
    return request


async def _run_ring_rank(request: RankAssignment, context: Any) -> RankOutcome:
    """Run one rank, for as long as the caller waits for its outcome."""
    return await run_rank(sys.executable, request, os.environ)


async def serve_echo(listen: str, token: str, tls: Tls | None, *, until_eof: bool) -> None:
    """Serve until SIGTERM, or until standard input ends: those that the doctor starts then end
    even if it is killed. Raises ConfigError."""
    server = rpc.server(token=token)
    handlers = {
        METHOD: grpc.unary_unary_rpc_method_handler(_echo_bytes, bytes, bytes),
        RING: grpc.unary_unary_rpc_method_handler(
            _run_ring_rank, parse_assignment, RankOutcome.to_bytes
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    over = asyncio.Event()
    StopSignals(lambda _number: over.set(), lambda _number: None).handle_in_loop()
    if until_eof:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    async with rpc.serving(server, listen, grace_s=_GRACE_S, tls=tls) as at:
        at.set_serving(True)
        print_json({"address": at.address})
        await over.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.launcher.doctor.echo_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--token-file", type=Path, help="default: $FLOTILLA_TOKEN")
    parser.add_argument("--tls-dir", type=Path, help="default: $FLOTILLA_TLS")
    parser.add_argument("--until-eof", action="store_true", help="end with standard input")
    given = parser.parse_args()
    try:
        token, tls = read_token(given.token_file), read_tls(given.tls_dir)
        asyncio.run(serve_echo(given.listen, token, tls, until_eof=given.until_eof))
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
