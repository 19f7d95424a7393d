"""Counters since the gateway's start, by environment."""

from collections import Counter
from dataclasses import dataclass, field

from flotilla_common.domain.attempts import Grade, ToolOutcome
from flotilla_env_gateway.ports import CallAnswer, Media

# The environment or the connection to it is at fault, not the policy.
CALL_ERRORS = frozenset(
    {
        ToolOutcome.NOT_EXECUTED,
        ToolOutcome.OUTCOME_UNKNOWN,
        ToolOutcome.SESSION_LOST,
        ToolOutcome.DEADLINE,
        ToolOutcome.REPLAY_MISS,
    }
)


@dataclass(slots=True)
class GatewayCounts:
    """Counters by environment: `outcomes` of calls; `content_bytes` of text and of images;
    `tainted` and `expired` episodes; `suspects` among grades."""

    calls: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    content_bytes: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    images: Counter[str] = field(default_factory=Counter[str])
    tainted: Counter[str] = field(default_factory=Counter[str])
    expired: Counter[str] = field(default_factory=Counter[str])
    grades: Counter[str] = field(default_factory=Counter[str])
    no_grades: Counter[str] = field(default_factory=Counter[str])
    suspects: Counter[str] = field(default_factory=Counter[str])
    no_grade_reasons: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])

    def env_keys(self) -> set[str]:
        return {*self.calls, *self.expired, *self.grades, *self.no_grades}

    def call_errors(self, env_key: str) -> int:
        return sum(self.outcomes[env_key, outcome.value] for outcome in CALL_ERRORS)

    def count_call(self, env_key: str, answer: CallAnswer) -> None:
        """Count a call at its first answer."""
        self.calls[env_key] += 1
        self.outcomes[env_key, answer.outcome.value] += 1
        for part in answer.parts:
            if isinstance(part, Media):
                image = part.mime.startswith("image/")
                self.images[env_key] += image
                self.content_bytes[env_key, "image" if image else "text"] += part.size
            else:
                self.content_bytes[env_key, "text"] += len(part.text.encode())

    def count_grade(self, env_key: str, grade: Grade) -> None:
        self.suspects[env_key] += bool(grade.suspicion)
        if grade.reason is None:
            self.grades[env_key] += 1
        else:
            self.no_grades[env_key] += 1
            self.no_grade_reasons[env_key, grade.reason.value] += 1


def counts_by_kind(counter: Counter[tuple[str, ...]], env_key: str) -> dict[str, int]:
    """Return one environment's counts by kind."""
    return {kind: n for (env, kind), n in sorted(counter.items()) if env == env_key}
