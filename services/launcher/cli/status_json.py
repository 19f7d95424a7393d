"""What `flotilla status --json` prints; docs/running.md documents it. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.cli.progress_view import HELD_OUT, TRAINING
from services.launcher.cli.run_view import STATE_NAMES

# Grows when a field changes its meaning or goes; new fields may come at any time.
VERSION = 1


def status_json(runs: Sequence[pb.Run], *, attended: bool) -> str:
    """`attended`: whether runs that go on have a launcher."""
    return json.dumps(
        {"version": VERSION, "attended": attended, "runs": [_run(run) for run in runs]}, indent=2
    )


def _run(run: pb.Run) -> dict[str, Any]:
    metrics = _finite(run.metrics)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": STATE_NAMES[run.state],
        "mode": _word(pb.RunMode.Name(run.mode), "RUN_MODE_"),
        "backend": run.backend,
        "created": _time(run.create_time),
        "ended": _time(run.end_time) if run.HasField("end_time") else None,
        "step": run.step,
        "total_steps": run.total_steps,
        "held_out_pass_at_1": metrics.get(HELD_OUT),
        "training_pass_at_1": metrics.get(TRAINING),
        "outcome": _word(pb.Outcome.Name(run.outcome), "OUTCOME_"),
        "error": run.error,
        "unreachable": run.unreachable,
        "cleanup": _word(pb.Cleanup.Name(run.cleanup), "CLEANUP_"),
        "cleanup_detail": run.cleanup_detail,
        "cost": {"accrued": run.cost.accrued, "per_hour": run.cost.per_hour},
        "directory": run.directory,
        "alarms": [_alarm(alarm) for alarm in run.alarms],
        "services": [_replica(replica) for replica in run.replicas],
        "metrics": metrics,
    }


def _alarm(alarm: alarm_pb.Alarm) -> dict[str, Any]:
    return {
        "rule": alarm.rule,
        "scope": alarm.scope,
        "severity": _word(alarm_pb.AlarmSeverity.Name(alarm.severity), "ALARM_SEVERITY_"),
        "step": alarm.step,
        "cause": alarm.cause,
        "fix": alarm.fix,
    }


def _replica(replica: pb.ServiceReplica) -> dict[str, Any]:
    return {
        "service": replica.service,
        "replica": replica.replica,
        "state": replica.state,
        "phase": replica.phase,
        "address": replica.address or None,
        "metrics_address": replica.metrics_address or None,
        "restarts": replica.restarts,
        "pid": replica.pid or None,
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for what is not finite."""
    return {n: v if math.isfinite(v) else None for n, v in sorted(metrics.items())}


def _time(stamp: Timestamp) -> str:
    return stamp.ToJsonString()


def _word(name: str, prefix: str) -> str | None:
    word = name.removeprefix(prefix).lower()
    return None if word == "unspecified" else word
