"""Execution of the calls of one turn, and the replies to them."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.domain.attempts import NoGradeReason, StopReason, ToolOutcome
from flotilla_common.text.printable_text import one_line
from flotilla_rollout.dialects.turns import PARSE_ERROR, ParseError, Reply, ToolCall
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.episodes.attempt_record import AttemptState
from flotilla_rollout.ports import EnvironmentLost, Episode
from flotilla_rollout.types import ToolResult

# Number of distinct names counted, and characters of each; the contract bounds both.
_NAMES, _NAME_CHARACTERS = 8, 200
# Concurrent calls of an episode, by the contract.
MOST_TOGETHER = 16
# Outcomes after which the state of the environment is unknown or unreachable.
LOST_OUTCOMES = (
    ToolOutcome.SESSION_LOST,
    ToolOutcome.OUTCOME_UNKNOWN,
    ToolOutcome.REPLAY_MISS,
)


@dataclass(slots=True)
class TurnOutcome:
    """Outcome of a turn's calls: the replies in order, the end of the attempt, if any, and the sum
    of the environment's rewards, if it gave any."""

    replies: list[Reply] = field(default_factory=list[Reply])
    stop: StopReason | None = None
    reward: float | None = None

    def add_result(self, call: ToolCall, result: ToolResult) -> None:
        self.replies.append(Reply(call, result.outcome, result.parts))
        if result.done:
            self.stop = StopReason.DONE
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + result.reward


async def execute_calls(
    calls: Sequence[ToolCall | ParseError],
    episode: Episode,
    state: AttemptState,
    limits: AttemptLimits,
) -> TurnOutcome:
    """Execute the calls in order, as far as the limits and the environment allow; consecutive
    read-only ones run together.

    Raises EnvironmentLost."""
    outcome, counts = TurnOutcome(), state.counts
    counts.malformed_turns += any(isinstance(item, ParseError) for item in calls)
    for step in _split_steps(calls, episode):
        if isinstance(step, ParseError):
            counts.parse_errors += 1
            _count_name(counts.parse_messages, step.message)
            outcome.replies.append(Reply(step, PARSE_ERROR, [step.message]))
            if limits.parse_errors is not None and counts.parse_errors > limits.parse_errors:
                outcome.stop = StopReason.MAX_PARSE_ERRORS
        else:
            left = len(step) if limits.calls is None else limits.calls - counts.tool_calls
            results = await _call_together(step[:left], episode, state, limits)
            for call, result in zip(step, results, strict=False):
                outcome.add_result(call, result)
            if left < len(step) and outcome.stop is None:
                outcome.stop = StopReason.MAX_CALLS
        if outcome.stop is not None:
            break
    return outcome


def _split_steps(
    calls: Sequence[ToolCall | ParseError], episode: Episode
) -> list[ParseError | list[ToolCall]]:
    """Split a turn into sequential steps. Calls of one step run together: a single one, or
    consecutive ones that the environment allows in parallel."""
    # By this episode's own tools: the prompt's may come from another gateway.
    parallel = {tool.name for tool in episode.info.tools if tool.parallel}
    steps: list[ParseError | list[ToolCall]] = []
    for item in calls:
        last = steps[-1] if steps else None
        if isinstance(item, ParseError):
            steps.append(item)
        elif isinstance(last, list) and _joins(item, last, parallel):
            last.append(item)
        else:
            steps.append([item])
    return steps


def _joins(call: ToolCall, step: list[ToolCall], parallel: Collection[str]) -> bool:
    both = call.name in parallel and step[0].name in parallel
    return both and len(step) < MOST_TOGETHER


async def _call_together(
    calls: Sequence[ToolCall], episode: Episode, state: AttemptState, limits: AttemptLimits
) -> list[ToolResult]:
    """Run calls together; return their results in order. The first failure ends the others."""
    if len(calls) == 1:
        return [await _call_tool(calls[0], episode, state, limits)]
    async with running_tasks(
        *(_call_tool(call, episode, state, limits) for call in calls)
    ) as tasks:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        raise_failure(tasks)
        return [task.result() for task in tasks]


async def _call_tool(
    call: ToolCall, episode: Episode, state: AttemptState, limits: AttemptLimits
) -> ToolResult:
    counts = state.counts
    counts.tool_calls += 1
    counts.repeats += (call.name, call.arguments_json) in state.calls_made
    state.calls_made.add((call.name, call.arguments_json))
    result = await episode.call_tool(call.name, call.arguments_json, limits.call_timeout_s)
    if result.outcome is not ToolOutcome.OK:
        counts.tool_errors[result.outcome] = counts.tool_errors.get(result.outcome, 0) + 1
    if result.outcome is ToolOutcome.BAD_TOOL:
        _count_name(counts.unknown_tools, call.name)
    if result.outcome in LOST_OUTCOMES:
        missed = result.outcome is ToolOutcome.REPLAY_MISS
        raise EnvironmentLost(
            f"{call.name}: {result.outcome}: {result.text}",
            NoGradeReason.REPLAY_MISS if missed else None,
        )
    return result


def _count_name(counts: dict[str, int], name: str) -> None:
    """Count a name that the policy wrote; only the first few distinct ones are kept."""
    name = one_line(name, _NAME_CHARACTERS)
    if name in counts or len(counts) < _NAMES:
        counts[name] = counts.get(name, 0) + 1
