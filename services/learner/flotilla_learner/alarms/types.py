"""Alarms, verdicts and the facts they are based on, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flotilla_learner.alarms.attempt_behavior import Conduct

# Scope of verdicts that concern no environment in particular.
ALL = "all"


class Severity(StrEnum):
    """Log level of an alarm. A notice is good news."""

    NOTICE = "notice"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class AlarmVerdict:
    """Current judgement of a rule on one thing (an environment, a stage, ...).

    `bad` is None between the limit that raises an alarm and the one that clears it."""

    rule: str
    scope: str
    bad: bool | None
    # The problem and what to try, for a person.
    cause: str = ""
    fix: str = ""
    value: float = 0.0
    limit: float = 0.0
    severity: Severity = Severity.WARNING


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that was raised or, with `raised` False, cleared."""

    verdict: AlarmVerdict
    raised: bool
    # Current step when that happened; then the step when it was raised.
    step: int
    since_step: int

    @property
    def text(self) -> str:
        """One line for a person."""
        verdict = self.verdict
        name = verdict.rule if verdict.scope == ALL else f"{verdict.rule} of {verdict.scope}"
        if not self.raised:
            return f"cleared in step {self.step}: {name}, raised in step {self.since_step}"
        return f"alarm in step {self.step}: {name}: {verdict.cause}. {verdict.fix}"


@dataclass(frozen=True, slots=True)
class SpoiledGroup:
    """The newest group of an environment that one of its attempts spoiled in one way: the text of
    that failure, and the number of groups of that environment that have ended since."""

    message: str
    groups_since: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about one step that the rules judge. Pairs are (part, whole); keys are
    environments."""

    step: int
    metrics: Mapping[str, float]
    # Groups whose attempts differ in reward, of all groups of the step.
    signal: Mapping[str, tuple[int, int]]
    # Tries without a known grade, of those that ended since the previous step.
    no_grade: Mapping[str, tuple[int, int]]
    # Groups dropped as too old, of those and the step's.
    stale: tuple[int, int]
    # Mean policy tokens of an attempt.
    lengths: Mapping[str, float]
    # Tasks given up since the previous step.
    given_up: Mapping[str, int]
    # Tries that the env_gateway refused to open since the previous step.
    refused: Mapping[str, int]
    # Message of the newest of those, and of the newest without a grade.
    refused_words: Mapping[str, str] = field(default_factory=dict[str, str])
    no_grade_words: Mapping[str, str] = field(default_factory=dict[str, str])
    # Conduct of the policy in the attempts of the step's groups.
    conduct: Mapping[str, Conduct] = field(default_factory=dict[str, Conduct])


@dataclass(frozen=True, slots=True)
class Streak:
    """The newest tries at one environment, if none of them got a grade."""

    tries: int
    # Count of each reason, and its last message.
    reasons: Mapping[str, int]
    words: Mapping[str, str] = field(default_factory=dict[str, str])
