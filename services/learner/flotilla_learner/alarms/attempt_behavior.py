"""Behaviour of a policy in its attempts, from their counts, and its description. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.trajectory import Trajectory

# Share from which a habit is worth reporting.
_OFTEN = 0.25
_MOSTLY = 0.5
# Most names, messages and checks listed separately.
_NAMED = 3
_LOOK = "look at its attempts (flotilla show RUN --failed)"


@dataclass(slots=True)
class Conduct:
    """Sums over attempts. Counters by name count attempts, except the one for errors, which counts
    each error."""

    attempts: int = 0
    rewarded: int = 0
    turns: int = 0
    malformed_turns: int = 0
    tool_calls: int = 0
    # Attempts that had tools but called none.
    silent: int = 0
    repeats: int = 0
    tool_errors: Counter[str] = field(default_factory=Counter[str])
    parse_errors: Counter[str] = field(default_factory=Counter[str])
    unknown_tools: Counter[str] = field(default_factory=Counter[str])
    stops: Counter[StopReason] = field(default_factory=Counter[StopReason])
    failed_checks: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: "Conduct") -> "Conduct":
        names = [each.name for each in fields(self)]
        return Conduct(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def add_attempt(self, attempt: Trajectory) -> None:
        counts = attempt.counts
        self.attempts += 1
        self.rewarded += bool(attempt.reward)
        self.turns += counts.turns
        self.malformed_turns += counts.malformed_turns
        self.tool_calls += counts.tool_calls
        self.silent += counts.tools > 0 and counts.tool_calls == 0
        self.repeats += counts.repeats
        self.tool_errors.update(counts.tool_errors)
        self.parse_errors.update(counts.parse_messages)
        self.unknown_tools.update(counts.unknown_tools.keys())
        self.failed_checks.update(attempt.checks_failed)
        if attempt.stop_reason is not None:
            self.stops[attempt.stop_reason] += 1


@dataclass(frozen=True, slots=True)
class Habit:
    """A recurring behaviour of the policy, phrased to follow `it ...`, and a remedy."""

    phrase: str
    fix: str


def sum_attempts(attempts: Iterable[Trajectory]) -> Conduct:
    conduct = Conduct()
    for attempt in attempts:
        conduct.add_attempt(attempt)
    return conduct


def find_habits(conduct: Conduct) -> list[Habit]:
    """List what the policy does instead of what would be rewarded, the most telling habit first."""
    found = [*_call_habits(conduct), *_limit_habits(conduct)]
    return found or [_fallback_habit(conduct)]


def _call_habits(conduct: Conduct) -> Iterator[Habit]:
    """Yield habits in calling tools, or reasons for not calling any."""
    whole = conduct.attempts
    if conduct.unknown_tools and max(conduct.unknown_tools.values()) >= _OFTEN * whole:
        names = _format_counts(conduct.unknown_tools, f" of {whole} episodes")
        yield Habit(
            f"calls tools that this server does not have: {names}",
            "Compare the tools that the server lists (flotilla env try) with those that the policy"
            f" knows or the task's prompt names; {_LOOK}",
        )
    if conduct.malformed_turns > _OFTEN * conduct.turns:
        share = conduct.malformed_turns / conduct.turns
        yield Habit(
            f"has parse errors in {share:.0%} of turns: {_format_counts(conduct.parse_errors)}",
            f"It may know another format of tool calls than the prompt specifies: {_LOOK}",
        )
    elif conduct.silent >= _MOSTLY * whole:
        yield Habit(
            f"never calls a tool ({conduct.silent} of {whole} episodes)",
            f"The chat template may not show it the tools: {_LOOK}",
        )
    errors = conduct.tool_errors - Counter(bad_tool=conduct.tool_errors["bad_tool"])
    if errors.total() >= _MOSTLY * max(1, conduct.tool_calls):
        yield Habit(
            f"makes calls that fail ({errors.total()} of {conduct.tool_calls}):"
            f" {_format_counts(errors)}",
            f"See what the tools return: {_LOOK}, and logs/env_gateway-0.log",
        )
    elif conduct.repeats >= _MOSTLY * max(1, conduct.tool_calls):
        yield Habit(
            f"repeats the same calls ({conduct.repeats} of {conduct.tool_calls})",
            f"It loops: {_LOOK}",
        )


_LIMITS = {
    StopReason.MAX_TURNS: "rollout.max_turns",
    StopReason.CONTEXT_OVERFLOW: "rollout.max_input_length",
    StopReason.GENERATION_LENGTH: "rollout.max_generate_length (and rollout.limits.turn_tokens)",
    StopReason.TIMEOUT: "rollout.attempt_timeout_s",
    StopReason.MAX_SAMPLED_TOKENS: "rollout.limits.sampled_tokens",
    StopReason.MAX_CALLS: "rollout.limits.calls",
    StopReason.MAX_PARSE_ERRORS: "rollout.limits.parse_errors",
}


def _limit_habits(conduct: Conduct) -> Iterator[Habit]:
    """Yield the limits that end the policy's attempts."""
    for stop, count in conduct.stops.most_common():
        if stop in _LIMITS and count >= _MOSTLY * conduct.attempts:
            yield Habit(
                f"stops by {stop.upper()} ({count} of {conduct.attempts} episodes)",
                f"Raise {_LIMITS[stop]} if its attempts were on the way to a solution: {_LOOK}",
            )


def _fallback_habit(conduct: Conduct) -> Habit:
    done, whole = conduct.stops[StopReason.DONE], conduct.attempts
    phrase = f"claims to be done in {done} of {whole} episodes, after"
    phrase += f" {conduct.tool_calls / max(1, whole):.1f} tool calls each"
    if conduct.failed_checks:
        phrase += f"; checks that fail: {_format_counts(conduct.failed_checks)}"
    return Habit(
        phrase,
        "The tasks are too hard, or the verifier passes nothing: solve one by hand and have it"
        " graded (flotilla env try); provide easier tasks, or partial rewards",
    )


def _format_counts(counted: Counter[str], unit: str = "") -> str:
    """Format counts, as in `search (41 of 96 episodes), browse (12)`."""
    first, *others = counted.most_common(_NAMED)
    named = [f"{first[0]} ({first[1]}{unit})", *(f"{name} ({count})" for name, count in others)]
    more = len(counted) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
