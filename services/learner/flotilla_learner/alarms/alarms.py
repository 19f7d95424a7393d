"""Registry of alarms: each is raised once and cleared when its cause is gone."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Standstill
from flotilla_common.text.printable_text import one_line
from flotilla_common.text.redaction import redact
from flotilla_learner.alarms import event_rules
from flotilla_learner.alarms.learning_rules import LearningRules
from flotilla_learner.alarms.moving_windows import RuleMemory
from flotilla_learner.alarms.ports import AlarmSink
from flotilla_learner.alarms.task_rules import TaskRules
from flotilla_learner.alarms.types import (
    Alarm,
    AlarmVerdict,
    Severity,
    SpoiledGroup,
    StepFacts,
    Streak,
)
from flotilla_learner.config.alarms import AlarmsConfig
from flotilla_learner.journal.disk_incidents import Incident

_log = get_logger(__name__)
# Longest text of one alarm, which appears on boards, in chats and in every heartbeat.
_CHARACTERS = 700
_LEVELS = {
    Severity.NOTICE: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}
_SEVEREST = (Severity.ERROR, Severity.WARNING, Severity.NOTICE)


class Alarms:
    """Alarms that are raised now. Safe to call from any thread."""

    def __init__(
        self,
        config: AlarmsConfig,
        sinks: Sequence[AlarmSink],
        *,
        max_staleness: int,
        remembered: Mapping[str, Any],
    ) -> None:
        """Restore `remembered`: the `memory` of an earlier start of the run, or empty."""
        self._config = config
        self._sinks = sinks
        self._memory = RuleMemory(config.window, config.count, remembered.get("firsts", {}))
        self._learning = LearningRules(config, self._memory, max_staleness=max_staleness)
        self._tasks = TaskRules(config, self._memory)
        self._evals = event_rules.EvalRule(config)
        self._raised: dict[tuple[str, str], Alarm] = {}
        self._lock = threading.Lock()
        self.step = 0
        # Called after each change, by the thread that made it.
        self.on_change: Callable[[], None] = lambda: None

    @property
    def memory(self) -> dict[str, Any]:
        """State that later starts of the run need."""
        return {"firsts": self._memory.firsts}

    @property
    def raised(self) -> list[Alarm]:
        """Raised alarms: the most severe first, and the oldest first among equals."""
        with self._lock:
            found = list(self._raised.values())
        return sorted(found, key=lambda alarm: _SEVEREST.index(alarm.verdict.severity))

    @property
    def count(self) -> int:
        """Number of raised alarms; good news does not count."""
        return sum(alarm.verdict.severity is not Severity.NOTICE for alarm in self.raised)

    @property
    def metrics(self) -> dict[str, float]:
        """`alarms/{rule}/{scope}`: 1 for each raised alarm."""
        keys = [alarm.verdict for alarm in self.raised]
        return {f"alarms/{v.rule}/{v.scope.replace('/', '_')}": 1.0 for v in keys}

    def judge_step(self, facts: StepFacts) -> None:
        """Judge a step. A finished step also clears the alarms about stalled stages."""
        self.step = facts.step
        self.apply_verdicts([*self._learning.judge_step(facts), *self._tasks.judge_step(facts)])
        self._clear_standstills()

    def judge_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self.apply_verdicts(self._evals.judge_evaluation(version, metrics))
        self._clear_standstills()

    def judge_tries(
        self,
        streaks: Mapping[str, Streak],
        spoiled: Mapping[tuple[str, str], SpoiledGroup] | None = None,
    ) -> None:
        """Judge tries while no step ends; call it about once a second."""
        verdicts = [event_rules.judge_streak(self._config, *item) for item in streaks.items()]
        groups = (spoiled or {}).items()
        self.apply_verdicts(
            [*verdicts, *(event_rules.judge_spoiled(*key, found) for key, found in groups)]
        )

    def report_damage(self, incident: Incident) -> None:
        """Raise an alarm about damage on disk that the run worked around."""
        self.apply_verdicts([event_rules.damage_verdict(incident)])

    def report_standstill(self, found: Standstill) -> None:
        """Raise an alarm about a stalled stage; called from the watchdog's thread."""
        self.apply_verdicts([event_rules.standstill_verdict(found.stage, found.seconds)])

    def report_failure(self, problem: str) -> None:
        """Raise the alarm that the run ends in an error."""
        self.apply_verdicts([event_rules.failure_verdict(problem)])

    def apply_verdicts(self, verdicts: Iterable[AlarmVerdict]) -> None:
        """Raise alarms for new bad verdicts, and clear those whose cause is gone."""
        for verdict in verdicts:
            if verdict.bad is not None:
                self._apply_verdict(verdict)

    def _clear_standstills(self) -> None:
        for alarm in self.raised:
            if alarm.verdict.rule == event_rules.NO_PROGRESS:
                self._apply_verdict(
                    AlarmVerdict(event_rules.NO_PROGRESS, alarm.verdict.scope, bad=False)
                )

    def _apply_verdict(self, verdict: AlarmVerdict) -> None:
        key = (verdict.rule, verdict.scope)
        with self._lock:
            known = self._raised.get(key)
            if bool(verdict.bad) == (known is not None):
                return
            if known is None:
                alarm = Alarm(
                    _sanitize_verdict(verdict), raised=True, step=self.step, since_step=self.step
                )
                self._raised[key] = alarm
            else:
                alarm = Alarm(known.verdict, False, self.step, known.since_step)
                del self._raised[key]
        self.on_change()
        self._send_alarm(alarm)

    def _send_alarm(self, alarm: Alarm) -> None:
        verdict = alarm.verdict
        facts = {"alarm": verdict.rule, "scope": verdict.scope, "at_step": alarm.step}
        if not alarm.raised:
            _log.info("an alarm is over", **facts, since_step=alarm.since_step)
        else:
            figures = {"value": round(verdict.value, 4), "limit": round(verdict.limit, 4)}
            report = {**facts, **figures, "cause": verdict.cause, "fix": verdict.fix}
            _log.log(_LEVELS[verdict.severity], "alarm", **report)
        for sink in self._sinks:
            sink.send_alarm(alarm)


def _sanitize_verdict(verdict: AlarmVerdict) -> AlarmVerdict:
    """Return the verdict with quoted text made harmless."""
    cause, fix = (one_line(redact(text), _CHARACTERS) for text in (verdict.cause, verdict.fix))
    return replace(verdict, cause=cause, fix=fix)
