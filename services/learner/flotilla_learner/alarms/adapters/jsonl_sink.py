"""Alarms as JSON lines, for people and programs to read later."""

import time
from pathlib import Path
from typing import Any

from flotilla_common.run_folder.metric_lines import encode_point
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.alarms.ports import AlarmSink
from flotilla_learner.alarms.types import Alarm

_log = get_logger(__name__)


class JsonlAlarmSink(AlarmSink):
    """Appends one line to a file for each alarm raised or cleared."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._failed = False

    def send_alarm(self, alarm: Alarm) -> None:
        line = encode_point({"run_id": self._run_id, **_alarm_to_json(alarm)})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            # Alarms are in the log too.
            if not self._failed:
                _log.warning("alarms cannot be written", path=str(self._path), error=str(error))
            self._failed = True


def _alarm_to_json(alarm: Alarm) -> dict[str, Any]:
    verdict = alarm.verdict
    return {
        "time": round(time.time(), 3),
        "step": alarm.step,
        "state": "raised" if alarm.raised else "cleared",
        "since_step": alarm.since_step,
        "alarm": verdict.rule,
        "scope": verdict.scope,
        "severity": verdict.severity,
        "value": verdict.value,
        "limit": verdict.limit,
        "cause": verdict.cause,
        "fix": verdict.fix,
    }
