"""RunService: the launcher's RPCs for people and their tools."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode

from flotilla.launcher.v1 import (
    run_service_pb2,
    run_service_pb2_grpc,
)
from flotilla_common.rpc.rpc import to_seconds
from flotilla_launcher.api import codec
from flotilla_launcher.api.run_pages import list_page
from flotilla_launcher.api.stream_age import STREAM_AGE_S, wait_for_change, wait_to_poll
from flotilla_launcher.control.admission import StartOrder, refusal_error
from flotilla_launcher.control.launcher import Launcher
from flotilla_launcher.state import RunMode
from flotilla_launcher.store import logs
from flotilla_launcher.store.ledger import RunEvent

DEFAULT_GRACE_S = 60.0
_EVENTS_PER_READ = 200

Context = Any


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """RPCs that start, show and end runs."""

    def __init__(self, launcher: Launcher, stream_age_s: float = STREAM_AGE_S) -> None:
        self._launcher = launcher
        self._stream_age_s = stream_age_s

    async def PlanRun(
        self, request: run_service_pb2.PlanRunRequest, context: Context
    ) -> run_service_pb2.PlanRunResponse:
        spec, offers = await self._launcher.plan_run(request.spec_json)
        services = [codec.planned_service_to_pb(*offer) for offer in offers]
        return run_service_pb2.PlanRunResponse(services=services, spec_sha256=spec.sha256)

    async def StartRun(
        self, request: run_service_pb2.StartRunRequest, context: Context
    ) -> run_service_pb2.StartRunResponse:
        order = StartOrder(
            request.spec_json,
            # An unspecified mode, or one that only a newer client knows, is TRAIN.
            codec.MODES.find_member(request.mode) or RunMode.TRAIN,
            request.resume_run_id,
            request.wait,
            request.priority,
        )
        run_id = await self._launcher.start_run(request.request_id, order)
        return run_service_pb2.StartRunResponse(run_id=run_id)

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: Context
    ) -> run_service_pb2.GetRunResponse:
        stored = self._launcher.get_run(request.run_id)
        return run_service_pb2.GetRunResponse(run=codec.run_to_pb(stored, self._launcher.folder))

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        if request.after_run_id:
            self._launcher.get_run(request.after_run_id)
        return list_page(self._launcher.store, self._launcher.folder, request)

    async def WatchRun(
        self, request: run_service_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.WatchRunResponse]:
        deadline = time.monotonic() + self._stream_age_s
        last, told = request.after_event, ""
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
            problem = self._launcher.store.write_problem
            if problem and problem != told:
                told = problem
                yield codec.unwritten_to_pb(last, problem)
            if supervisor and supervisor.has_ended_unwritten:
                end = RunEvent(last, time.time(), "state", {"state": supervisor.run.state})
                yield codec.event_to_pb(end, stored)
                return
            if change is None:
                return
            await wait_for_change(change, deadline)

    async def ScaleService(
        self, request: run_service_pb2.ScaleServiceRequest, context: Context
    ) -> run_service_pb2.ScaleServiceResponse:
        await self._launcher.scale_service(request.run_id, request.service, request.replicas)
        return run_service_pb2.ScaleServiceResponse()

    async def TailLogs(
        self, request: run_service_pb2.TailLogsRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.TailLogsResponse]:
        stored = self._launcher.get_run(request.run_id)
        if request.service and request.service not in stored.run.wanted:
            message = f"no service {request.service!r}; the run has {', '.join(stored.run.wanted)}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
        if negative := [name for name, at in request.after_bytes.items() if at < 0]:
            message = f"after_bytes of {negative[0]} is negative; a log begins at 0"
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
                await wait_to_poll(deadline)

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
        if request.request_id and self._launcher.store.get_run(run_id) is None:
            # It was waiting in the queue.
            return run_service_pb2.StopRunResponse()
        return run_service_pb2.StopRunResponse(state=codec.STATES.encode(state), run_id=run_id)

    async def Reap(
        self, request: run_service_pb2.ReapRequest, context: Context
    ) -> run_service_pb2.ReapResponse:
        found, suspected = await self._launcher.reap_orphans(dry_run=request.dry_run)
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
