"""RegistryService: the launcher's RPCs for replicas and agents of runs."""

import time
from collections.abc import AsyncIterator
from typing import Any

from grpc import StatusCode

from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.rpc import to_duration
from flotilla_launcher import clock
from flotilla_launcher.api import agent_codec, agent_service, codec
from flotilla_launcher.api.stream_age import STREAM_AGE_S, wait_for_change
from flotilla_launcher.control import budget
from flotilla_launcher.control.launcher import Launcher, refusal_error
from flotilla_launcher.control.supervisor import Supervisor
from flotilla_launcher.store.roster import ReplacedError, TooManyMembersError, UnregisteredError

# Longest incarnation or address of a replica.
_TEXT_CHARACTERS = 512

Context = Any


class RegistryService(registry_service_pb2_grpc.RegistryServiceServicer):
    """Registry that gives replicas their peers' addresses and their commands; with `run_id`,
    only those of one run."""

    def __init__(
        self, launcher: Launcher, stream_age_s: float = STREAM_AGE_S, *, run_id: str = ""
    ) -> None:
        self._launcher = launcher
        self._spools = agent_service.PushedLogs(launcher)
        self._stream_age_s = stream_age_s
        self._run_id = run_id

    def _find_supervisor(self, run_id: str, service: str) -> Supervisor:
        supervisor = self._launcher.get_supervisor(run_id)
        if supervisor is None or self._run_id not in ("", run_id):
            message = f"no run {run_id!r} is active here"
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_RUN", message)
        if service not in supervisor.run.wanted:
            message = f"no service {service!r}; the run has {', '.join(supervisor.run.wanted)}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
        return supervisor

    async def Register(
        self, request: registry_service_pb2.RegisterRequest, context: Context
    ) -> registry_service_pb2.RegisterResponse:
        supervisor = self._find_supervisor(request.run_id, request.service)
        _check_reachable(request)
        try:
            supervisor.register_replica(codec.member_from_pb(request, clock.now()))
        except (ReplacedError, TooManyMembersError) as error:
            raise _not_taken(request, error) from error
        config = supervisor.config
        return registry_service_pb2.RegisterResponse(
            heartbeat_interval=to_duration(config.heartbeat_interval_s),
            orphan_after=to_duration(config.patience_s()),
        )

    async def Heartbeat(
        self, request: registry_service_pb2.HeartbeatRequest, context: Context
    ) -> registry_service_pb2.HeartbeatResponse:
        supervisor = self._find_supervisor(request.run_id, request.service)
        key = (request.service, request.replica)
        try:
            command = supervisor.record_heartbeat(
                key, request.incarnation, request.serving, codec.progress_from_pb(request)
            )
        except ReplacedError as error:
            raise _not_taken(request, error) from error
        except UnregisteredError as error:
            message = f"{request.service}-{request.replica} is not registered; register first"
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_REPLICA", message) from error
        return registry_service_pb2.HeartbeatResponse(
            command=agent_codec.COMMANDS.encode(command),
            metrics=budget.cost_metrics(supervisor.run.cost, supervisor.progress.metrics),
        )

    async def ResolvePeers(
        self, request: registry_service_pb2.ResolvePeersRequest, context: Context
    ) -> AsyncIterator[registry_service_pb2.ResolvePeersResponse]:
        deadline = time.monotonic() + self._stream_age_s
        sent: list[registry_service_pb2.Peer] | None = None
        while True:
            supervisor = self._find_supervisor(request.run_id, request.service)
            change = supervisor.changed.next_change
            peers = [
                codec.peer_to_pb(found)
                for found in supervisor.roster.serving_members(request.service)
            ]
            if peers != sent:
                sent = peers
                yield registry_service_pb2.ResolvePeersResponse(peers=peers)
            if time.monotonic() >= deadline:
                return
            await wait_for_change(change, deadline)

    async def ReportUnit(
        self, request: registry_service_pb2.ReportUnitRequest, context: Context
    ) -> registry_service_pb2.ReportUnitResponse:
        try:
            return agent_service.handle_report(
                self._find_supervisor(request.run_id, request.service), request
            )
        except (ReplacedError, TooManyMembersError) as error:
            raise _not_taken(request, error) from error

    async def PushLogs(
        self, request: registry_service_pb2.PushLogsRequest, context: Context
    ) -> registry_service_pb2.PushLogsResponse:
        if self._run_id not in ("", request.run_id):
            # The caller's token belongs to this registry's run, not to the one it names.
            message = f"this is not the registry of run {request.run_id!r}"
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_RUN", message)
        return self._spools.push_logs(request)


def _check_reachable(request: registry_service_pb2.RegisterRequest) -> None:
    """Refuse a registration that peers cannot use: they receive every registered replica."""
    host, _, port = request.address.rpartition(":")
    texts = (request.incarnation, request.address, request.metrics_address)
    if max(map(len, texts)) > _TEXT_CHARACTERS:
        message = f"incarnation and addresses may have at most {_TEXT_CHARACTERS} characters"
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_ADDRESS", message)
    if request.incarnation and host and port.isdecimal():
        return
    label = f"{request.service}-{request.replica}"
    message = f"{label} needs an incarnation and an address host:port, not {request.address!r}"
    raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_ADDRESS", message)


def _not_taken(request: Any, error: ReplacedError | TooManyMembersError) -> ServiceError:
    if isinstance(error, TooManyMembersError):
        return refusal_error(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REPLICAS", str(error))
    message = f"another process has replaced this {request.service}-{request.replica}: exit"
    return refusal_error(StatusCode.FAILED_PRECONDITION, "REPLACED", message)
