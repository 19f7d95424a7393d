"""Raises each alarm once and clears it when its cause is gone."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.log import get_logger, redact
from services.common.text import one_line
from services.common.watchdog import Standstill
from services.learner.alarms import event_rules
from services.learner.alarms.moving_windows import Memory
from services.learner.alarms.rules import LearningRules
from services.learner.alarms.task_rules import TaskRules
from services.learner.alarms.types import (
    Alarm,
    Severity,
    StepFacts,
    Streak,
    TemplateError,
    Verdict,
)
from services.learner.config.alarms import AlarmsConfig
from services.learner.journal.disk_incidents import Incident
from services.learner.ports import AlarmSink

_log = get_logger(__name__)
# Of the text of one alarm: it is on boards, in chats and in every heartbeat.
_CHARACTERS = 700
_LEVELS = {
    Severity.NOTICE: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}
_SEVEREST = (Severity.ERROR, Severity.WARNING, Severity.NOTICE)


class Alarms:
    """What is raised now. May be called from any thread."""

    def __init__(
        self,
        config: AlarmsConfig,
        sinks: Sequence[AlarmSink],
        *,
        max_staleness: int,
        remembered: Mapping[str, Any],
    ) -> None:
        """`remembered` is `memory` of an earlier start of the run, or empty."""
        self._config = config
        self._sinks = sinks
        self._memory = Memory(config.window, config.count, remembered.get("firsts", {}))
        self._learning = LearningRules(config, self._memory, max_staleness=max_staleness)
        self._tasks = TaskRules(config, self._memory)
        self._evals = event_rules.EvalRule(config)
        self._raised: dict[tuple[str, str], Alarm] = {}
        self._lock = threading.Lock()
        self.step = 0
        # Called after each change, by whichever thread made it.
        self.on_change: Callable[[], None] = _ignore

    @property
    def memory(self) -> dict[str, Any]:
        """What later starts of the run should know."""
        return {"firsts": self._memory.firsts}

    @property
    def raised(self) -> list[Alarm]:
        """The most severe first, and of those the oldest."""
        with self._lock:
            found = list(self._raised.values())
        return sorted(found, key=lambda alarm: _SEVEREST.index(alarm.verdict.severity))

    @property
    def count(self) -> int:
        """How many are raised; good news is no alarm."""
        return sum(alarm.verdict.severity is not Severity.NOTICE for alarm in self.raised)

    @property
    def metrics(self) -> dict[str, float]:
        """`alarms/{rule}/{scope}`: 1 for each that is raised."""
        keys = [alarm.verdict for alarm in self.raised]
        return {f"alarms/{v.rule}/{v.scope.replace('/', '_')}": 1.0 for v in keys}

    def step_done(self, facts: StepFacts) -> None:
        """Judge a step. That it ended clears what was said about stages that stood still."""
        self.step = facts.step
        self.judge([*self._learning.of(facts), *self._tasks.of(facts)])
        self._moved()

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        self.judge(self._evals.of(version, metrics))
        self._moved()

    def look(
        self,
        streaks: Mapping[str, Streak],
        template_errors: Mapping[str, TemplateError] | None = None,
    ) -> None:
        """Call it about once a second: what goes wrong while no step ends."""
        self.judge(event_rules.failing(self._config, streaks))
        self.judge(event_rules.template_errors(template_errors or {}))

    def damage(self, incident: Incident) -> None:
        """Something on disk was not what had been written, and the run went on without it."""
        self.judge([event_rules.damage(incident)])

    def standstill(self, found: Standstill) -> None:
        """A stage stands still; from the watchdog's thread."""
        self.judge([event_rules.standstill(found.stage, found.seconds)])

    def failed(self, problem: str) -> None:
        """The run ends in an error."""
        self.judge([event_rules.failed(problem)])

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Raise what is bad and not raised yet, clear what is well again."""
        for verdict in verdicts:
            if verdict.bad is not None:
                self._set(verdict)

    def _moved(self) -> None:
        for alarm in self.raised:
            if alarm.verdict.rule == event_rules.NO_PROGRESS:
                self._set(Verdict(event_rules.NO_PROGRESS, alarm.verdict.scope, bad=False))

    def _set(self, verdict: Verdict) -> None:
        key = (verdict.rule, verdict.scope)
        with self._lock:
            known = self._raised.get(key)
            if bool(verdict.bad) == (known is not None):
                return
            if known is None:
                alarm = Alarm(_plain(verdict), raised=True, step=self.step, since_step=self.step)
                self._raised[key] = alarm
            else:
                alarm = Alarm(known.verdict, False, self.step, known.since_step)
                del self._raised[key]
        self.on_change()
        self._tell(alarm)

    def _tell(self, alarm: Alarm) -> None:
        verdict = alarm.verdict
        facts = {"alarm": verdict.rule, "scope": verdict.scope, "at_step": alarm.step}
        if not alarm.raised:
            _log.info("an alarm is over", **facts, since_step=alarm.since_step)
        else:
            figures = {"value": round(verdict.value, 4), "limit": round(verdict.limit, 4)}
            said = {**facts, **figures, "cause": verdict.cause, "fix": verdict.fix}
            _log.log(_LEVELS[verdict.severity], "alarm", **said)
        for sink in self._sinks:
            sink.send(alarm)


def _plain(verdict: Verdict) -> Verdict:
    """With words of others made harmless."""
    cause, fix = (one_line(redact(text), _CHARACTERS) for text in (verdict.cause, verdict.fix))
    return replace(verdict, cause=cause, fix=fix)


def _ignore() -> None:
    """Nobody waits for changes."""
