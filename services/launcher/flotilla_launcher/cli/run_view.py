"""Display state of a run, gathered from its events. Pure."""

from dataclasses import dataclass, field

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb

# The learner's estimate at the end of a step; 0 while it has none.
_SECONDS_LEFT = "timing/seconds_left"
ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED)
TOKEN_KINDS = ("prompt", "sampled", "trained")
STATE_NAMES = {
    number: name.removeprefix("RUN_STATE_").lower() for name, number in pb.RunState.items()
}


@dataclass(slots=True)
class RunBoard:
    """Latest state, replicas and progress of one run."""

    state: "pb.RunState.ValueType" = pb.RUN_STATE_UNSPECIFIED
    replicas: dict[str, str] = field(default_factory=dict[str, str])
    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    cost: pb.Cost = field(default_factory=pb.Cost)
    # Raised alarms by name.
    alarms: dict[str, alarm_pb.Alarm] = field(default_factory=dict[str, alarm_pb.Alarm])
    # The learner's estimate of the remaining time and when it came; the newest event's time.
    _left: tuple[float, float] = (0.0, 0.0)
    _now: float = 0.0

    def take_event(self, event: pb.WatchRunResponse) -> str:
        """Apply an event and return the line to print for it, if any."""
        match event.WhichOneof("what"):
            case "state":
                self.state = event.state
                return f"run {STATE_NAMES[event.state]}"
            case "replica":
                replica = event.replica
                name = f"{replica.service}-{replica.replica}"
                known, self.replicas[name] = self.replicas.get(name), replica.state
                return f"{name} {replica.state}" if known != replica.state else ""
            case "progress":
                self._take_progress(event.progress, event.time.seconds + event.time.nanos / 1e9)
                return ""
            case "cost":
                self.cost = event.cost
                return ""
            case "raised":
                self.alarms[alarm_name(event.raised)] = event.raised
                return alarm_text(event.raised)
            case "cleared":
                self.alarms.pop(alarm_name(event.cleared), None)
                return f"over: {alarm_name(event.cleared)}"
            case _:
                return event.message

    def _take_progress(self, progress: pb.Progress, now: float) -> None:
        self.phase, self.total_steps = progress.phase, progress.total_steps
        self.metrics, self.step, self._now = dict(progress.metrics), progress.step, now
        left = self.metrics.get(_SECONDS_LEFT, 0.0)
        if left != self._left[0]:
            self._left = (left, now)

    @property
    def phase_text(self) -> str:
        """Phase, with the progress of an evaluation."""
        total = self.metrics.get("eval/progress_total")
        if self.phase != "evaluating" or not total:
            return self.phase
        return f"evaluating {self.metrics.get('eval/progress_done', 0):.0f}/{total:.0f}"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def seconds_left(self) -> float | None:
        """The learner's estimate, less the time since; None before this start's second step."""
        left, since = self._left
        return max(0.0, left - (self._now - since)) if left and not self.has_ended else None

    def pass_by_env(self) -> dict[str, float]:
        """Return pass@1 of each environment out of `reward/{env}/pass_at_1`."""
        found: dict[str, float] = {}
        for name, value in self.metrics.items():
            head, _, rest = name.partition("/")
            env, _, metric = rest.partition("/")
            if head == "reward" and metric == "pass_at_1" and env != "all":
                found[env] = value
        return found


def alarm_name(alarm: alarm_pb.Alarm) -> str:
    return alarm.rule if alarm.scope == "all" else f"{alarm.rule} of {alarm.scope}"


def alarm_text(alarm: alarm_pb.Alarm) -> str:
    """Format an alarm with its cause and fix on one line."""
    kind = "notice" if alarm.severity == alarm_pb.ALARM_SEVERITY_NOTICE else "alarm"
    detail = ". ".join(part for part in (alarm.cause, alarm.fix) if part)
    return f"{kind}: {alarm_name(alarm)}, since step {alarm.step}: {detail}"


def duration_text(seconds: float) -> str:
    """Format a duration: `42 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def count_tokens(cost: pb.Cost) -> dict[str, int]:
    """Return the tokens that a run was billed for, by their kind."""
    return {kind: getattr(cost.tokens, kind) for kind in TOKEN_KINDS}


def format_cleanup(run: pb.Run) -> str:
    return pb.Cleanup.Name(run.cleanup).removeprefix("CLEANUP_").lower().replace("_", " ")


def format_outcome(run: pb.Run) -> str:
    return pb.Outcome.Name(run.outcome).removeprefix("OUTCOME_").lower()
