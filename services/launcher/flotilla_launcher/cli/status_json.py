"""Output of `flotilla status --json`; docs/running.md documents it. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.progress_view import HELD_OUT, TRAINING
from flotilla_launcher.cli.run_view import STATE_NAMES, count_tokens

# Incremented when a field changes its meaning or is removed, but not for new fields.
VERSION = 1


def format_status_json(
    runs: Sequence[pb.Run],
    *,
    attended: bool,
    more: int = 0,
    cells: Sequence[Mapping[str, Any]] = (),
    differing: Mapping[str, Any] | None = None,
) -> str:
    """Format runs as JSON. `attended`: live runs have a launcher. `more`: runs that match, and are
    not among these. `cells`: the chosen columns of each run, if any are. `differing`: the values of
    each key by which the specs of compared runs differ."""
    head = {"version": VERSION, "attended": attended, "more": more}
    listed = [_run_to_json(run) for run in runs]
    for each, columns in zip(listed, cells, strict=False):
        each["columns"] = columns
    compared = {} if differing is None else {"differing": differing}
    return json.dumps({**head, "runs": listed, **compared}, indent=2)


def _run_to_json(run: pb.Run) -> dict[str, Any]:
    metrics = _finite_or_null(run.metrics)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": STATE_NAMES[run.state],
        "mode": _enum_to_word(pb.RunMode.Name(run.mode), "RUN_MODE_"),
        "backend": run.backend,
        "created": run.create_time.ToJsonString(),
        "ended": run.end_time.ToJsonString() if run.HasField("end_time") else None,
        "step": run.step,
        "total_steps": run.total_steps,
        "held_out_pass_at_1": metrics.get(HELD_OUT),
        "training_pass_at_1": metrics.get(TRAINING),
        "outcome": _enum_to_word(pb.Outcome.Name(run.outcome), "OUTCOME_"),
        "error": run.error,
        "priority": run.priority,
        "queue_place": run.queue_place or None,
        "waiting": run.waiting,
        "unreachable": run.unreachable,
        "cleanup": _enum_to_word(pb.Cleanup.Name(run.cleanup), "CLEANUP_"),
        "cleanup_detail": run.cleanup_detail,
        "cost": {
            "accrued": run.cost.accrued,
            "per_hour": run.cost.per_hour,
            "tokens": count_tokens(run.cost),
        },
        "directory": run.directory,
        "alarms": [_alarm_to_json(alarm) for alarm in run.alarms],
        "services": [_replica_to_json(replica) for replica in run.replicas],
        "metrics": metrics,
    }


def _alarm_to_json(alarm: alarm_pb.Alarm) -> dict[str, Any]:
    return {
        "rule": alarm.rule,
        "scope": alarm.scope,
        "severity": _enum_to_word(alarm_pb.AlarmSeverity.Name(alarm.severity), "ALARM_SEVERITY_"),
        "step": alarm.step,
        "cause": alarm.cause,
        "fix": alarm.fix,
    }


def _replica_to_json(replica: pb.ServiceReplica) -> dict[str, Any]:
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


def _finite_or_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace non-finite values by None: JSON cannot express them."""
    return {n: v if math.isfinite(v) else None for n, v in sorted(metrics.items())}


def _enum_to_word(name: str, prefix: str) -> str | None:
    word = name.removeprefix(prefix).lower()
    return None if word == "unspecified" else word
