"""Cases for each rpc that a launcher serves: a call that has its documented effect, and calls
that it refuses."""

import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as run_pb
from flotilla_common.spec.config import canonical_json
from flotilla_launcher.store.log_spool import MAX_CHUNK_BYTES
from tests.contract.test_run_service import units, wish
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import ServedLauncher

REFUSED, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
EARLY, CONFLICT = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS
BAD_SPEC, BAD_SERVICE = (REFUSED, "BAD_SPEC"), (REFUSED, "BAD_SERVICE")
UNKNOWN_RUN = (NOT_FOUND, "UNKNOWN_RUN")
SPEC = canonical_json(wish())
LINES = "first\nsecond\n"


@dataclass
class World:
    """A launcher over a socket, and a run of it whose rollout has registered and has a log."""

    served: ServedLauncher
    backend: FakeBackend
    folder: Path
    run_id: str = ""

    async def begin(self) -> None:
        request = run_pb.StartRunRequest(request_id="first", spec_json=SPEC)
        self.run_id = (await self.served.runs.StartRun(request)).run_id
        await units(self.backend, "rollout")
        await self.served.registry.Register(registry_pb.RegisterRequest(**self.member()))
        (self.folder / self.run_id / "logs").mkdir()
        (self.folder / self.run_id / "logs" / "learner-0.log").write_text(LINES)
        with closing(sqlite3.connect(self.folder / self.run_id / "journal.sqlite")) as journal:
            journal.execute("CREATE TABLE groups (group_id TEXT)")

    def who(self, **changes: Any) -> dict[str, Any]:
        named = {"service": "rollout", "replica": 0, "incarnation": "a"}
        return {"run_id": self.run_id, **named, **changes}

    def member(self, **changes: Any) -> dict[str, Any]:
        return {**self.who(), "address": "127.0.0.1:9", "pid": 1, **changes}


def _is_spec(text: str | bytes) -> bool:
    """The spec that was submitted, with the Flotilla that wrote it."""
    spec = json.loads(text)
    return bool(spec.pop("written_by")) and canonical_json(spec) == SPEC


Make = Callable[[World], Message]
Refusal = tuple[grpc.StatusCode, str]


@dataclass(frozen=True)
class Case:
    """`request` is good; `shows` checks the answers to it and to its repeat.

    `refused` has bad calls by their fault. Faults that no call of the rpc can have are in `never`,
    each with the reason.
    """

    request: Make
    shows: Callable[[World, list[Any]], Awaitable[object] | object]
    refused: Mapping[str, tuple[Make, Refusal]] = field(default_factory=dict[str, Any])
    never: Mapping[str, str] = field(default_factory=dict[str, str])


def _of_run(message: type[Message]) -> dict[str, tuple[Make, Refusal]]:
    def stranger(_: World) -> Message:
        return message(run_id="missing-20260101-000000")  # pyright: ignore[reportCallIssue]

    return {"unknown run": (stranger, UNKNOWN_RUN)}


_ONLY_A_RUN = {"bad input": "a run is all that it takes"}
_NO_RUN = {"unknown run": "it is about no run in particular"}
_NOTHING = {**_NO_RUN, "bad input": "it takes nothing"}


def _start(**fields: Any) -> Make:
    given: dict[str, Any] = {"request_id": "second", "spec_json": SPEC, **fields}
    return lambda _: run_pb.StartRunRequest(**given)


RUN_SERVICE = {
    "PlanRun": Case(
        lambda _: run_pb.PlanRunRequest(spec_json=SPEC),
        lambda _, replies: (
            {p.service for p in replies[0].services} == {"learner", "rollout", "env_gateway"}
        ),
        {"bad input": (lambda _: run_pb.PlanRunRequest(spec_json="{"), BAD_SPEC)},
        _NO_RUN,
    ),
    "StartRun": Case(
        _start(),
        lambda world, replies: replies[0].run_id not in ("", world.run_id),
        {
            "bad input": (_start(request_id="bad", spec_json="[]"), BAD_SPEC),
            "no request id": (_start(request_id=""), BAD_SPEC),
            "other content": (
                _start(request_id="first", spec_json=canonical_json(wish(seed=9))),
                (CONFLICT, "REQUEST_CONFLICT"),
            ),
            "unknown run": (_start(request_id="b", spec_json="", resume_run_id="no"), UNKNOWN_RUN),
            "a run that is active": (
                lambda world: run_pb.StartRunRequest(request_id="c", resume_run_id=world.run_id),
                (CONFLICT, "RUN_ACTIVE"),
            ),
        },
    ),
    "GetRun": Case(
        lambda world: run_pb.GetRunRequest(run_id=world.run_id),
        lambda world, replies: (
            _is_spec(replies[0].run.spec_json) and replies[0].run.run_id == world.run_id
        ),
        _of_run(run_pb.GetRunRequest),
        _ONLY_A_RUN,
    ),
    "ListRuns": Case(
        lambda _: run_pb.ListRunsRequest(),
        lambda world, replies: [run.run_id for run in replies[0].runs] == [world.run_id],
        {
            "unknown run": (
                lambda _: run_pb.ListRunsRequest(after_run_id="missing-20260101-000000"),
                UNKNOWN_RUN,
            )
        },
        {"bad input": "a filter that fits no run is answered with none"},
    ),
    "WatchRun": Case(
        lambda world: run_pb.WatchRunRequest(run_id=world.run_id),
        lambda _, replies: (
            [event.event for event in replies] == list(range(1, len(replies) + 1))
            and replies[0].state == run_pb.RUN_STATE_PREFLIGHT
        ),
        _of_run(run_pb.WatchRunRequest),
        {"bad input": "any number is behind some events, or behind all"},
    ),
    "ScaleService": Case(
        lambda world: run_pb.ScaleServiceRequest(
            run_id=world.run_id, service="rollout", replicas=2
        ),
        lambda world, _: world.served.until(
            world.run_id, lambda run: sum(r.service == "rollout" for r in run.replicas) == 2
        ),
        {
            "bad input": (
                lambda world: run_pb.ScaleServiceRequest(run_id=world.run_id, service="rolout"),
                BAD_SERVICE,
            ),
            "too few": (
                lambda world: run_pb.ScaleServiceRequest(run_id=world.run_id, service="rollout"),
                BAD_SERVICE,
            ),
            **_of_run(run_pb.ScaleServiceRequest),
        },
    ),
    "TailLogs": Case(
        lambda world: run_pb.TailLogsRequest(run_id=world.run_id, service="learner", lines=9),
        lambda _, replies: (
            [line.line for line in replies] == LINES.split()
            and replies[-1].after_bytes == len(LINES)
        ),
        {
            "bad input": (
                lambda world: run_pb.TailLogsRequest(run_id=world.run_id, service="lerner"),
                BAD_SERVICE,
            ),
            "no position": (
                lambda world: run_pb.TailLogsRequest(
                    run_id=world.run_id, after_bytes={"learner-0": -1}
                ),
                (REFUSED, "BAD_POSITION"),
            ),
            **_of_run(run_pb.TailLogsRequest),
        },
    ),
    "StopRun": Case(
        lambda world: run_pb.StopRunRequest(run_id=world.run_id),
        lambda world, replies: (
            replies[0].state == run_pb.RUN_STATE_STOPPED and world.backend.cleaned == [world.run_id]
        ),
        _of_run(run_pb.StopRunRequest),
        _ONLY_A_RUN,
    ),
    "Reap": Case(
        lambda _: run_pb.ReapRequest(),
        lambda _, replies: replies[0] == run_pb.ReapResponse(),
        never=_NOTHING,
    ),
}
REGISTRY_SERVICE = {
    "Register": Case(
        lambda world: registry_pb.RegisterRequest(**world.member()),
        lambda _, replies: (
            replies[0].HasField("heartbeat_interval") and replies[0].HasField("orphan_after")
        ),
        {
            "bad input": (
                lambda world: registry_pb.RegisterRequest(**world.member(service="rolout")),
                BAD_SERVICE,
            ),
            "no address": (
                lambda world: registry_pb.RegisterRequest(**world.member(address="127.0.0.1")),
                (REFUSED, "BAD_ADDRESS"),
            ),
            "no incarnation": (
                lambda world: registry_pb.RegisterRequest(**world.member(incarnation="")),
                (REFUSED, "BAD_ADDRESS"),
            ),
            **_of_run(registry_pb.RegisterRequest),
        },
    ),
    "Heartbeat": Case(
        lambda world: registry_pb.HeartbeatRequest(**world.who(), phase="serving", serving=True),
        lambda _, replies: replies[0].command == registry_pb.COMMAND_NONE,
        {
            "bad input": (
                lambda world: registry_pb.HeartbeatRequest(**world.who(replica=7)),
                (NOT_FOUND, "UNKNOWN_REPLICA"),
            ),
            "another": (
                lambda world: registry_pb.HeartbeatRequest(**world.who(incarnation="z")),
                (EARLY, "REPLACED"),
            ),
            **_of_run(registry_pb.HeartbeatRequest),
        },
    ),
    "ResolvePeers": Case(
        lambda world: registry_pb.ResolvePeersRequest(run_id=world.run_id, service="rollout"),
        lambda _, replies: replies == [registry_pb.ResolvePeersResponse()],
        {
            "bad input": (
                lambda world: registry_pb.ResolvePeersRequest(run_id=world.run_id, service="x"),
                BAD_SERVICE,
            ),
            **_of_run(registry_pb.ResolvePeersRequest),
        },
    ),
    "ReportUnit": Case(
        lambda world: registry_pb.ReportUnitRequest(
            **world.who(), phase=registry_pb.UNIT_PHASE_RUNNING
        ),
        lambda _, replies: replies[0].HasField("lease") and replies[0].begun,
        {
            "bad input": (
                lambda world: registry_pb.ReportUnitRequest(**world.who(service="x")),
                BAD_SERVICE,
            ),
            **_of_run(registry_pb.ReportUnitRequest),
        },
    ),
    "PushLogs": Case(
        lambda world: registry_pb.PushLogsRequest(**world.who(), chunk=b"one\ntwo"),
        lambda world, replies: (
            replies[0].position == 7
            and (world.folder / world.run_id / "logs/rollout-0.log").read_text() == "one\ntwo"
        ),
        {
            "bad input": (
                lambda world: registry_pb.PushLogsRequest(**world.who(service="../x")),
                (REFUSED, "BAD_LOG"),
            ),
            "no position": (
                lambda world: registry_pb.PushLogsRequest(
                    **world.who(), position=-3, chunk=b"lost"
                ),
                (REFUSED, "BAD_LOG"),
            ),
            "too much": (
                lambda world: registry_pb.PushLogsRequest(
                    **world.who(), chunk=b"x" * (MAX_CHUNK_BYTES + 1)
                ),
                (REFUSED, "BAD_LOG"),
            ),
            "a gap": (
                lambda world: registry_pb.PushLogsRequest(**world.who(), position=9, chunk=b"x"),
                (EARLY, "LOG_GAP"),
            ),
            **_of_run(registry_pb.PushLogsRequest),
        },
    ),
}
CASES: Mapping[str, Case] = {
    **{f"RunService/{name}": case for name, case in RUN_SERVICE.items()},
    **{f"RegistryService/{name}": case for name, case in REGISTRY_SERVICE.items()},
}
