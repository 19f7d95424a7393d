"""A temporary gateway for commands that play episodes themselves."""

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.rpc import rpc
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.config.backend_tables import (
    FLEET_BACKENDS,
    backend_of,
    backend_tables,
    without_replaced,
)
from flotilla_launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.security.service_variables import inherited_variables
from flotilla_launcher.state import GATEWAY

# What a gateway's spec must hold, and no gateway uses.
_UNUSED = {"name": '"by-hand"', "policy": '{model = "none", max_model_len = 1}'}


def gateway_section(spec: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return the gateway's table of a spec, with the backends that are in use. Raises
    ConfigError."""
    return without_replaced(load_spec(spec, overrides).get(GATEWAY, {}))


def paid_backend(section: Mapping[str, Any], env_key: str) -> str:
    """Return the backend of an environment if it is one of Fleet's, which charges for instances; ""
    for others, and for a server that the gateway starts itself."""
    backend = backend_of(section, env_key)
    tables = backend_tables(section, backend).values() if backend in FLEET_BACKENDS else ()
    return backend if any(not table.get("command") for table in tables) else ""


@asynccontextmanager
async def open_gateway(spec: Path, overrides: Sequence[str]) -> AsyncGenerator[Any]:
    """Start a gateway by the spec, whose other tables it does without, and yield a stub of its
    EpisodeService. Its warnings are printed. Raises ConfigError, and CommandError if it does not
    serve."""
    given = load_spec(spec, overrides)
    overrides = [*overrides, *(f"--{key}={_UNUSED[key]}" for key in _UNUSED if key not in given)]
    inherits = inherited_variables(read_spec(load_spec(spec, overrides), str(spec)), GATEWAY)
    try:
        async with (
            serve_gateway(spec, overrides, _show_warning, inherits=inherits) as (address, token),
            rpc.channel(address, token=token) as channel,
        ):
            yield EpisodeServiceStub(channel)
    except GatewayError as error:
        raise CommandError(str(error)) from error


def _show_warning(line: str) -> None:
    """Print the gateway's warnings and errors; skip its other log lines."""
    if '"level": "info"' not in line:
        print_visible(line, file=sys.stderr)
