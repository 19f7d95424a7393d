"""RunService and RegistryService: translation between the gRPC contract and the launcher."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode

from flotilla.launcher.v1 import (
    registry_service_pb2,
    registry_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
)
from services.common.errors import ServiceError
from services.common.rpc import to_duration, to_seconds
from services.launcher import clock
from services.launcher.api import agent_codec, agent_service, codec
from services.launcher.control import budget
from services.launcher.control.launcher import Launcher, refusal_error
from services.launcher.control.supervisor import Supervisor
from services.launcher.store import logs
from services.launcher.store.roster import ReplacedError, TooManyMembersError, UnregisteredError

DEFAULT_GRACE_S = 60.0
# A stream ends after this long, and the client asks again: nothing hangs for ever.
STREAM_AGE_S = 300.0
_FOLLOW_S = 0.2
_EVENTS_PER_READ = 200
# Of what a replica says of itself.
_TEXT_CHARACTERS = 512

Context = Any


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """Service that starts runs, shows them and ends them."""

    def __init__(self, launcher: Launcher, stream_age_s: float = STREAM_AGE_S) -> None:
        self._launcher = launcher
        self._stream_age_s = stream_age_s

    async def PlanRun(
        self, request: run_service_pb2.PlanRunRequest, context: Context
    ) -> run_service_pb2.PlanRunResponse:
        plan, offers = await self._launcher.plan_run(request.spec_json)
        services = [codec.planned_service_to_pb(*offer) for offer in offers]
        return run_service_pb2.PlanRunResponse(services=services, spec_sha256=plan.sha256)

    async def StartRun(
        self, request: run_service_pb2.StartRunRequest, context: Context
    ) -> run_service_pb2.StartRunResponse:
        run_id = await self._launcher.start_run(
            request.request_id,
            request.spec_json,
            codec.mode_from_pb(request.mode),
            request.resume_run_id,
        )
        return run_service_pb2.StartRunResponse(run_id=run_id)

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: Context
    ) -> run_service_pb2.GetRunResponse:
        stored = self._launcher.get_run(request.run_id)
        return run_service_pb2.GetRunResponse(run=codec.run_to_pb(stored, self._launcher.folder))

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        folder, stored = self._launcher.folder, self._launcher.store.list_newest()
        return run_service_pb2.ListRunsResponse(
            runs=[codec.run_to_pb(found, folder, brief=True) for found in stored]
        )

    async def WatchRun(
        self, request: run_service_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.WatchRunResponse]:
        deadline = time.monotonic() + self._stream_age_s
        last = request.after_event
        while True:
            stored = self._launcher.get_run(request.run_id)
            supervisor = self._launcher.get_supervisor(request.run_id)
            change = supervisor.changed.next_change if supervisor else None
            events = self._launcher.store.list_events(request.run_id, last, _EVENTS_PER_READ)
            for event in events:
                last = event.number
                yield codec.event_to_pb(event, stored)
            if events:
                continue
            if change is None:
                return
            await _wait_for_change(change, deadline)

    async def ScaleService(
        self, request: run_service_pb2.ScaleServiceRequest, context: Context
    ) -> run_service_pb2.ScaleServiceResponse:
        self._launcher.scale_service(request.run_id, request.service, request.replicas)
        return run_service_pb2.ScaleServiceResponse()

    async def TailLogs(
        self, request: run_service_pb2.TailLogsRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.TailLogsResponse]:
        stored = self._launcher.get_run(request.run_id)
        if request.service and request.service not in stored.run.wanted:
            message = f"no service {request.service!r}; there are {', '.join(stored.run.wanted)}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
        if negative := [name for name, at in request.after_bytes.items() if at < 0]:
            message = f"after_bytes of {negative[0]} is negative: 0 is a log's beginning"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_POSITION", message)
        tail = LogTail(dict(request.after_bytes), request.lines)
        run_dir = self._launcher.folder / request.run_id
        deadline = time.monotonic() + self._stream_age_s
        while True:
            over = not request.follow or self._launcher.get_supervisor(request.run_id) is None
            sources = logs.list_sources(run_dir, request.service)
            lines = [line for name in sources for line in tail.read_more(name, sources, over)]
            for line in lines:
                yield run_service_pb2.TailLogsResponse(
                    source=line.source, line=line.text, after_bytes=line.end
                )
            if over and not lines:
                return
            if not lines:
                await _wait_to_poll(deadline)

    async def StopRun(
        self, request: run_service_pb2.StopRunRequest, context: Context
    ) -> run_service_pb2.StopRunResponse:
        grace_s = to_seconds(request.grace) if request.HasField("grace") else DEFAULT_GRACE_S
        run_id = request.run_id
        if request.request_id:
            run_id = await self._launcher.find_or_prevent_run(request.request_id)
            if not run_id:
                return run_service_pb2.StopRunResponse()
        state = await self._launcher.stop_run(run_id, grace_s)
        return run_service_pb2.StopRunResponse(state=codec.STATES[state], run_id=run_id)

    async def Reap(
        self, request: run_service_pb2.ReapRequest, context: Context
    ) -> run_service_pb2.ReapResponse:
        found, suspected = await self._launcher.reap_strays(dry_run=request.dry_run)
        return run_service_pb2.ReapResponse(
            reaped=found.ended, suspected_run_ids=suspected, unreachable=found.unreachable
        )


@dataclass(slots=True)
class LogTail:
    """Read positions of each log. A log that appears later is read from its beginning."""

    positions: dict[str, int]
    lines: int
    _first: bool = field(default=True)

    def read_more(self, name: str, sources: dict[str, Any], final: bool) -> list[logs.LogLine]:
        path = sources[name]
        if name not in self.positions:
            self.positions[name] = logs.find_tail_position(path, self.lines) if self._first else 0
        if name == list(sources)[-1]:
            self._first = False
        found = logs.read_lines(path, self.positions[name], final=final)
        if found:
            self.positions[name] = found[-1].end
        return found


async def _wait_for_change(change: asyncio.Event, deadline: float) -> None:
    """Wait for a change. A stream past its age ends with UNAVAILABLE, and the client asks
    again."""
    _check_age(deadline)
    with suppress(TimeoutError):
        # Not wait_for: that one loses a cancellation which comes together with the event.
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await change.wait()


async def _wait_to_poll(deadline: float) -> None:
    _check_age(deadline)
    await asyncio.sleep(_FOLLOW_S)


def _check_age(deadline: float) -> None:
    if time.monotonic() >= deadline:
        message = "this stream has reached its age; go on from where it ended"
        raise refusal_error(StatusCode.UNAVAILABLE, "STREAM_AGE", message)


class RegistryService(registry_service_pb2_grpc.RegistryServiceServicer):
    """Service that tells services where their peers are, and what to do; with `run_id` those
    of one run."""

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
            message = f"no service {service!r}; there are {', '.join(supervisor.run.wanted)}"
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
            command=agent_codec.COMMANDS[command],
            metrics=budget.cost_metrics(supervisor.run.cost, supervisor.progress.metrics),
        )

    async def ResolvePeers(
        self, request: registry_service_pb2.ResolvePeersRequest, context: Context
    ) -> AsyncIterator[registry_service_pb2.ResolvePeersResponse]:
        deadline = time.monotonic() + self._stream_age_s
        told: list[registry_service_pb2.Peer] | None = None
        while True:
            supervisor = self._find_supervisor(request.run_id, request.service)
            change = supervisor.changed.next_change
            peers = [
                codec.peer_to_pb(found)
                for found in supervisor.roster.serving_members(request.service)
            ]
            if peers != told:
                told = peers
                yield registry_service_pb2.ResolvePeersResponse(peers=peers)
            if time.monotonic() >= deadline:
                return
            await _wait_for_change(change, deadline)

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
            # Its token is of this registry's run, whatever it names.
            message = f"this is not the registry of run {request.run_id!r}"
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_RUN", message)
        return self._spools.push_logs(request)


def _check_reachable(request: registry_service_pb2.RegisterRequest) -> None:
    """Refuse a registration without what peers need: they are told of whoever registers."""
    host, _, port = request.address.rpartition(":")
    texts = (request.incarnation, request.address, request.metrics_address)
    if max(map(len, texts)) > _TEXT_CHARACTERS:
        message = f"incarnation and addresses may have {_TEXT_CHARACTERS} characters"
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_ADDRESS", message)
    if request.incarnation and host and port.isdecimal():
        return
    who = f"{request.service}-{request.replica}"
    message = f"{who} needs an incarnation and an address host:port, not {request.address!r}"
    raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_ADDRESS", message)


def _not_taken(request: Any, error: ReplacedError | TooManyMembersError) -> ServiceError:
    if isinstance(error, TooManyMembersError):
        return refusal_error(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REPLICAS", str(error))
    message = f"another process is {request.service}-{request.replica} by now: exit"
    return refusal_error(StatusCode.FAILED_PRECONDITION, "REPLACED", message)
