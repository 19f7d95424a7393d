"""What the end of a request says about the backend. No I/O; times are arguments, in seconds.

A caller's deadline is no evidence: a backend has failed to answer only when it was given as long as
it usually takes.
"""

from collections import OrderedDict, deque
from enum import StrEnum

from services.env_gateway.ports import BackendError

_WINDOW = 32
# A tool's time varies with its arguments: a multiple of the slowest answer is no coincidence.
_MARGIN = 4.0
_KINDS_KEPT = 1024
_FAILING_KEPT = 4096


class Evidence(StrEnum):
    """THROTTLED and SILENT say that there was too much at once; SILENT and FAILED that the backend
    does not work; NOTHING neither."""

    SUCCESS = "success"
    THROTTLED = "throttled"
    SILENT = "silent"
    FAILED = "failed"
    NOTHING = "nothing"


class UsualTime:
    """How long a backend may take to answer: a multiple of the slowest of its last answers to the
    same kind of request, within bounds; the upper one while it has answered none."""

    def __init__(self, *, at_least_s: float, at_most_s: float) -> None:
        self._at_least_s = min(at_least_s, at_most_s)
        self._at_most_s = at_most_s
        self._answers: OrderedDict[str, deque[float]] = OrderedDict()

    def answered(self, kind: str, seconds: float) -> None:
        answers = self._answers.setdefault(kind, deque(maxlen=_WINDOW))
        answers.append(seconds)
        self._answers.move_to_end(kind)
        if len(self._answers) > _KINDS_KEPT:
            self._answers.popitem(last=False)

    def of(self, kind: str) -> float:
        answers = self._answers.get(kind)
        if not answers:
            return self._at_most_s
        return min(self._at_most_s, max(self._at_least_s, _MARGIN * max(answers)))


class Observer:
    """Judges the requests of one gate, by `kind`, such as the tool, and by instance.

    `apart`: each instance is a machine or a process of its own. Silence is then that one's alone,
    and an instance that fails says so once, until it answers again.
    """

    def __init__(self, usual: UsualTime, *, apart: bool = False) -> None:
        self._usual = usual
        self._apart = apart
        self._failing: OrderedDict[str, None] = OrderedDict()

    def answered(self, kind: str, instance_id: str, seconds: float) -> Evidence:
        self._usual.answered(kind, seconds)
        self._failing.pop(instance_id, None)
        return Evidence.SUCCESS

    def failed(self, error: BackendError, kind: str, instance_id: str, seconds: float) -> Evidence:
        if error.kind == "throttled":
            return Evidence.THROTTLED
        if error.kind == "timeout":
            return self.unanswered(kind, instance_id, seconds)
        if error.invalid or error.bad_arguments or error.lost:
            return Evidence.NOTHING
        return self._own(instance_id) if self._apart else Evidence.FAILED

    def unanswered(self, kind: str, instance_id: str, seconds: float) -> Evidence:
        """Its caller's time was over after `seconds`, or its caller has left."""
        if seconds < self._usual.of(kind):
            return Evidence.NOTHING
        return self._own(instance_id) if self._apart else Evidence.SILENT

    def _own(self, instance_id: str) -> Evidence:
        if instance_id in self._failing:
            return Evidence.NOTHING
        self._failing[instance_id] = None
        if len(self._failing) > _FAILING_KEPT:
            self._failing.popitem(last=False)
        return Evidence.FAILED
