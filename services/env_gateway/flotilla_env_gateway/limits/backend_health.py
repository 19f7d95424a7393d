"""Evidence about a backend's health from the ends of requests. No I/O; times are arguments, in
seconds.

A caller's deadline is no evidence: a backend has failed to answer only if it was given its
usual answer time."""

from collections import deque
from enum import StrEnum

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_env_gateway.config.gateway import BreakerConfig
from flotilla_env_gateway.ports import BackendError

_WINDOW = 32
# A tool's time varies with its arguments; a multiple of the slowest answer is significant.
_MARGIN = 4.0
_KINDS_KEPT = 1024
_FAILING_KEPT = 4096


class HealthEvidence(StrEnum):
    """Meaning of a request's end: THROTTLED and SILENT are evidence of overload; SILENT and
    FAILED that the backend does not work; NOTHING of neither."""

    SUCCESS = "success"
    THROTTLED = "throttled"
    SILENT = "silent"
    FAILED = "failed"
    NOTHING = "nothing"


class UsualTime:
    """Usual answer time of a backend: a multiple of the slowest of its last answers to the
    same kind of request, within bounds; the upper bound until it has answered one."""

    def __init__(self, *, at_least_s: float, at_most_s: float) -> None:
        self._at_least_s = min(at_least_s, at_most_s)
        self._at_most_s = at_most_s
        self._answers: BoundedDict[str, deque[float]] = BoundedDict(_KINDS_KEPT)

    @classmethod
    def within_timeout(cls, breaker: BreakerConfig, timeout_s: float) -> "UsualTime":
        """Make the usual time of requests that may take `timeout_s`. A backend that has never
        answered counts as failed after half of that."""
        return cls(at_least_s=breaker.patience_s, at_most_s=timeout_s / 2)

    def record_answer(self, kind: str, seconds: float) -> None:
        self._answers[kind] = self._answers.get(kind) or deque(maxlen=_WINDOW)
        self._answers[kind].append(seconds)

    def usual_seconds(self, kind: str) -> float:
        answers = self._answers.get(kind)
        if not answers:
            return self._at_most_s
        return min(self._at_most_s, max(self._at_least_s, _MARGIN * max(answers)))


class RequestObserver:
    """Judge of the requests at one gate, by `kind`, such as the tool, and by instance.

    `apart`: each instance is a separate machine or process. Silence is then evidence about
    that instance alone, and a failing instance counts once, until it answers again."""

    def __init__(self, usual: UsualTime, *, apart: bool = False) -> None:
        self._usual = usual
        self._apart = apart
        self._failing: BoundedDict[str, None] = BoundedDict(_FAILING_KEPT)

    def observe_answer(self, kind: str, instance_id: str, seconds: float) -> HealthEvidence:
        self._usual.record_answer(kind, seconds)
        self._failing.pop(instance_id, None)
        return HealthEvidence.SUCCESS

    def observe_failure(
        self, error: BackendError, kind: str, instance_id: str, seconds: float
    ) -> HealthEvidence:
        if error.kind == "throttled":
            return HealthEvidence.THROTTLED
        if error.kind == "timeout":
            return self.observe_silence(kind, instance_id, seconds)
        if error.invalid or error.bad_arguments or error.lost:
            return HealthEvidence.NOTHING
        return self._blame_instance(instance_id) if self._apart else HealthEvidence.FAILED

    def observe_silence(self, kind: str, instance_id: str, seconds: float) -> HealthEvidence:
        """Judge a request whose caller ran out of time after `seconds`, or left."""
        if seconds < self._usual.usual_seconds(kind):
            return HealthEvidence.NOTHING
        return self._blame_instance(instance_id) if self._apart else HealthEvidence.SILENT

    def _blame_instance(self, instance_id: str) -> HealthEvidence:
        if instance_id in self._failing:
            return HealthEvidence.NOTHING
        self._failing[instance_id] = None
        return HealthEvidence.FAILED
