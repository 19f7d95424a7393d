"""Steps as input of the alarm rules."""

from collections.abc import Mapping
from typing import Any

from flotilla_learner.alarms.alarms import Alarms
from flotilla_learner.alarms.types import Alarm, StepFacts
from flotilla_learner.config.alarms import AlarmsConfig

CONFIG = AlarmsConfig(window=4, count=16)


class Heard:
    """Keeps the alarms that it is sent. Implements `AlarmSink`."""

    def __init__(self) -> None:
        self.alarms: list[Alarm] = []

    def send_alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)

    def close(self) -> None:
        """Do nothing."""

    @property
    def names(self) -> list[str]:
        """Return `+rule/scope` for raised alarms and `-rule/scope` for cleared ones."""
        return [
            f"{'+' if a.raised else '-'}{a.verdict.rule}/{a.verdict.scope}" for a in self.alarms
        ]


def alarms(
    *, max_staleness: int = 1, remembered: Mapping[str, Any] | None = None
) -> tuple[Alarms, Heard]:
    heard = Heard()
    return (
        Alarms(CONFIG, [heard], max_staleness=max_staleness, remembered=remembered or {}),
        heard,
    )


def facts(step: int, metrics: Mapping[str, float] | None = None, **changes: Any) -> StepFacts:
    """Return a healthy step, except for the changes."""
    values: dict[str, Any] = {
        "signal": {"shop": (4, 8)},
        "no_grade": {"shop": (0, 32)},
        "stale": (0, 8),
        "lengths": {"shop": 100.0},
        "given_up": {"shop": 0},
        "refused": {"shop": 0},
        **changes,
    }
    well = {"policy/entropy": 1.0, "async/staleness_max": 1.0, "async/staleness_mean": 0.5}
    well |= {"environment/shop/tool_error_rate": 0.0}
    return StepFacts(step=step, metrics={**well, **(metrics or {})}, **values)
