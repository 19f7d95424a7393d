"""Conversion between the launcher's own types and Protobuf messages."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import TypeAdapter

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as run_pb
from flotilla_common.text.printable_text import one_line
from flotilla_common.wire.enums import EnumCodec
from flotilla_launcher.backends.ports import LaunchSpec, ResourceOffer
from flotilla_launcher.backends.sky import names
from flotilla_launcher.control import budget
from flotilla_launcher.control.ledger_writer import replica_body
from flotilla_launcher.run_progress import Alarm, Progress
from flotilla_launcher.state import Cleanup, Cost, Outcome, RunMode, RunState
from flotilla_launcher.store.ledger import RunEvent, StoredRun
from flotilla_launcher.store.roster import Member

STATES = EnumCodec(RunState, run_pb.RunState)
OUTCOMES: Mapping[Outcome, "run_pb.Outcome.ValueType"] = {
    **{each: run_pb.Outcome.Value(f"OUTCOME_{each.name}") for each in Outcome if each},
    Outcome.NONE: run_pb.OUTCOME_UNSPECIFIED,
}
CLEANUPS = EnumCodec(Cleanup, run_pb.Cleanup)
MODES = EnumCodec(RunMode, run_pb.RunMode)
SEVERITIES: Mapping[str, "alarm_pb.AlarmSeverity.ValueType"] = {
    name: alarm_pb.AlarmSeverity.Value(f"ALARM_SEVERITY_{name.upper()}")
    for name in ("notice", "warning", "error")
}
_NAME_CHARACTERS, _TEXT_CHARACTERS = 200, 1_000
_COST = TypeAdapter(Cost)
# Metrics of a run in a list of runs.
_HEADLINES = ("eval/all/pass_at_1", "reward/avg_pass_at_1")


def timestamp_to_pb(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


def run_to_pb(stored: StoredRun, folder: Path, *, brief: bool = False) -> run_pb.Run:
    """Convert the current state of a run; `brief` omits its spec and most metrics."""
    found = stored.run
    replicas = [
        run_pb.ServiceReplica(**replica_body(found.replicas[key])) for key in sorted(found.replicas)
    ]
    if found.backend == "sky":
        owner = names.owner_of(folder)
        for each in replicas:
            key = (each.service, each.replica)
            each.machine = names.member_name(owner, found.run_id, key)
    return run_pb.Run(
        run_id=found.run_id,
        name=found.name,
        state=STATES.encode(found.state),
        mode=MODES.encode(found.mode),
        spec_json="" if brief else stored.spec_json,
        replicas=replicas,
        create_time=timestamp_to_pb(stored.created),
        end_time=timestamp_to_pb(stored.ended),
        error=found.error,
        metrics={n: v for n, v in stored.metrics.items() if n in _HEADLINES or not brief},
        directory=str(folder / found.run_id),
        outcome=OUTCOMES[found.outcome if found.state.has_ended else Outcome.NONE],
        cleanup=CLEANUPS.encode(found.cleanup),
        cleanup_detail=found.cleanup_detail,
        cost=_cost_to_pb(found.cost, stored),
        backend=found.backend,
        unreachable=found.unreachable,
        priority=found.priority,
        queue_place=found.queue_place,
        waiting=found.waiting,
        alarms=[alarm_to_pb(each) for each in stored.alarms],
        step=stored.step,
        total_steps=stored.total_steps,
    )


def _cost_to_pb(found: Cost, stored: StoredRun) -> run_pb.Cost:
    limits = json.loads(stored.spec_json).get("launcher", {})
    return run_pb.Cost(
        accrued=found.accrued,
        per_hour=found.per_hour,
        max_cost=limits.get("max_cost", 0.0),
        max_hours=limits.get("max_hours", 0.0),
        max_tokens=limits.get("max_tokens", 0),
        tokens=run_pb.TokenCount(**asdict(found.tokens)),
        accrued_by_service=found.by_service,
        estimated_by_service=budget.cost_by_service(
            stored.prices, stored.run.wanted, limits.get("max_hours")
        ),
    )


def event_to_pb(found: RunEvent, stored: StoredRun) -> run_pb.WatchRunResponse:
    response = run_pb.WatchRunResponse(event=found.number, time=timestamp_to_pb(found.time))
    match found.kind:
        case "state":
            response.state = STATES.encode(RunState(found.body["state"]))
        case "replica":
            response.replica.CopyFrom(run_pb.ServiceReplica(**found.body))
        case "cost":
            response.cost.CopyFrom(_cost_to_pb(_COST.validate_python(found.body), stored))
        case "progress":
            response.progress.CopyFrom(run_pb.Progress(**found.body))
        case "alarm":
            body = dict(found.body)
            getattr(response, body.pop("change")).CopyFrom(alarm_to_pb(Alarm(**body)))
        case _:
            response.message = found.body["text"]
    return response


def unwritten_to_pb(last_event: int, problem: str) -> run_pb.WatchRunResponse:
    """Return what a watcher hears while the ledger takes no events: it repeats the last number."""
    text = f"{problem}. The run waits until it can be: make room on the disk"
    now = timestamp_to_pb(time.time())
    return run_pb.WatchRunResponse(event=last_event, time=now, message=text)


def planned_service_to_pb(
    launch: LaunchSpec, replicas: int, offer: ResourceOffer
) -> run_pb.PlannedService:
    return run_pb.PlannedService(
        service=launch.key[0],
        replicas=replicas,
        command=launch.command,
        resources=offer.resources,
        task_yaml=offer.task_yaml,
        dollars_per_hour=offer.dollars_per_hour,
    )


def member_from_pb(request: registry_pb.RegisterRequest, now: float) -> Member:
    return Member(
        service=request.service,
        replica=request.replica,
        incarnation=request.incarnation,
        address=request.address,
        last_beat=now,
        metrics_address=request.metrics_address,
    )


def progress_from_pb(request: registry_pb.HeartbeatRequest) -> Progress:
    return Progress(
        phase=request.phase,
        step=request.step,
        total_steps=request.total_steps,
        metrics=dict(request.metrics),
        alarms=tuple(_alarm_from_pb(each) for each in request.alarms),
        tracker_url=one_line(request.tracker_url, _TEXT_CHARACTERS),
    )


def _alarm_from_pb(wire: alarm_pb.Alarm) -> Alarm:
    """Read an alarm and make its texts printable: any replica may report one."""
    known = {value: key for key, value in SEVERITIES.items()}
    rule, scope = (one_line(text, _NAME_CHARACTERS) for text in (wire.rule, wire.scope))
    cause, fix = (one_line(text, _TEXT_CHARACTERS) for text in (wire.cause, wire.fix))
    return Alarm(rule, scope, known.get(wire.severity, "warning"), wire.step, cause, fix)


def alarm_to_pb(found: Alarm) -> alarm_pb.Alarm:
    return alarm_pb.Alarm(
        rule=found.rule,
        scope=found.scope,
        severity=SEVERITIES[found.severity],
        step=found.step,
        cause=found.cause,
        fix=found.fix,
    )


def peer_to_pb(found: Member) -> registry_pb.Peer:
    return registry_pb.Peer(
        replica=found.replica, address=found.address, incarnation=found.incarnation
    )
