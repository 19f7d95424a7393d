"""`flotilla env status`: the state of a run's environments, as its gateways report it."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.process.arguments import TOKEN_VARIABLE
from flotilla_common.rpc import rpc
from flotilla_common.rpc.network_addresses import is_loopback, split_host_port
from flotilla_common.rpc.tls import Tls, read_tls
from flotilla_common.text.printable_text import print_json
from flotilla_launcher.cli.command_runner import OK, reports_errors
from flotilla_launcher.cli.run_source import find_stored_run
from flotilla_launcher.cli.terminal import CommandError, Terminal, make_table, print_table
from flotilla_launcher.security.certificates import LAUNCHER, RunIdentity, load_identity
from flotilla_launcher.state import GATEWAY

_CALL_S = 5.0
_ENVIRONMENTS = (
    *("ENV", "BACKEND", "EPISODES", "LIMIT", "CALLS", "ERRORS", "GRADES", "NO GRADE"),
    *("TAINTED", "EXPIRED", "BREAKER"),
)
_LIMITERS = ("LIMITER", "OF", "IN FLIGHT", "WAITING", "LIMIT")


class NoGatewayError(CommandError):
    """Raised when no gateway can be reached; the message states the cause."""


@dataclass(frozen=True, slots=True)
class GatewayTarget:
    """Address and credentials of a gateway to query; `label` is its name in its run."""

    label: str
    address: str
    token: str
    tls: Tls | None = None


@reports_errors()
def env_status(run_id: str, runs: Path, address: str | None, *, as_json: bool) -> int:
    """Print the status of a run's gateways, or of the one at `address`."""
    answers = asyncio.run(_get_statuses(_find_gateways(run_id, runs, address)))
    if as_json:
        print_json({"gateways": [_status_to_dict(one, answer) for one, answer in answers]})
        return OK
    console = Terminal()
    for gateway, answer in answers:
        _print_status(gateway, answer, console)
    return OK


def _find_gateways(run_id: str, runs: Path, address: str | None) -> list[GatewayTarget]:
    if address is not None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise NoGatewayError(f"set {TOKEN_VARIABLE} to the token of the gateway at {address}")
        return [GatewayTarget(address, address, token, read_tls(None))]
    run = find_stored_run(run_id, runs).run
    replicas = [replica for key, replica in sorted(run.replicas.items()) if key[0] == GATEWAY]
    serving = [one for one in replicas if one.address and not one.state.is_over]
    known = load_identity(runs, run.run_id)
    if known is None or not serving:
        raise NoGatewayError(
            f"no env_gateway of run {run.run_id} is running; its state: {run.state}"
        )
    return [_gateway_of_run(one.label, one.address, known) for one in serving]


def _gateway_of_run(label: str, address: str, known: RunIdentity) -> GatewayTarget:
    tls = None if is_loopback(split_host_port(address, "gateway")[0]) else known.tls_for(LAUNCHER)
    return GatewayTarget(label, address, known.token, tls)


async def _get_statuses(
    gateways: Sequence[GatewayTarget],
) -> list[tuple[GatewayTarget, pb.GetStatusResponse]]:
    answers = await asyncio.gather(*(_get_status(gateway) for gateway in gateways))
    return list(zip(gateways, answers, strict=True))


async def _get_status(gateway: GatewayTarget) -> pb.GetStatusResponse:
    """Query the status of one gateway. Raises NoGatewayError."""
    try:
        async with rpc.channel(
            gateway.address, token=gateway.token, tls=gateway.tls, peer=GATEWAY
        ) as channel:
            stub: Any = EpisodeServiceStub(channel)
            return await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        detail = known.message if known else error.details()
        raise NoGatewayError(
            f"{gateway.label} at {gateway.address} did not answer: {error.code().name}: {detail}"
        ) from error


def _status_to_dict(gateway: GatewayTarget, answer: pb.GetStatusResponse) -> dict[str, Any]:
    status = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {"gateway": gateway.label, "address": gateway.address, **status}


def _print_status(gateway: GatewayTarget, answer: pb.GetStatusResponse, console: Terminal) -> None:
    console.print(f"{gateway.label}  {answer.phase}  {gateway.address}", style="bold")
    environments = make_table(_ENVIRONMENTS)
    for one in answer.environments:
        environments.add_row(*_format_cells(one))
    if answer.environments:
        print_table(environments, console)
    else:
        console.print("no episode has been opened yet")
    limiters = make_table(_LIMITERS)
    for one in answer.limiters:
        numbers = (str(one.in_flight), str(one.waiting), str(one.limit))
        limiters.add_row(one.name, one.of or "all", *numbers)
    print_table(limiters, console)
    running = answer.instances_created - answer.instances_closed
    console.print(
        f"instances {running} (created {answer.instances_created}, being deleted "
        f"{answer.delete_backlog})  retries left {answer.retry_tokens:g}",
        highlight=False,
    )
    bounds = ", ".join(answer.sandbox_limits)
    console.print(
        f"sandbox of verifiers: {f'bounded by {bounds}' if bounds else 'none'}", highlight=False
    )


def _format_cells(one: pb.EnvironmentStatus) -> tuple[str, ...]:
    errors = f"{one.call_errors} ({one.call_errors / one.calls:.1%})" if one.calls else "-"
    return (
        one.env_key,
        one.backend,
        _format_counts(one.episodes) or "-",
        str(one.limit),
        str(one.calls),
        errors,
        f"{one.grades}" + (f" ({one.suspects} suspect)" if one.suspects else ""),
        f"{one.no_grades}"
        + (f" ({_format_counts(one.no_grade_reasons)})" if one.no_grades else ""),
        str(one.tainted),
        str(one.expired),
        one.breaker or "-",
    )


def _format_counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(numbers.items()) if n)
