"""Execution of tool calls: limits, deadlines, and retries where they are safe."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.tasks.task_format import TaskError, load_json_object
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes import event_metrics
from flotilla_env_gateway.episodes.call_gates import CallGates
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.turn_line import TurnPlace
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import (
    BackendError,
    CallAnswer,
    CallResult,
    Instance,
    PolicyCall,
    Text,
    Tool,
)
from flotilla_env_gateway.tools.call_retries import RetryBudget, decide_retry
from flotilla_env_gateway.tools.offered_screen import ScreenCall
from flotilla_env_gateway.tools.spoken_screen import ScreenStep
from flotilla_env_gateway.tools.tool_selection import SUBMIT_FINAL_ANSWER, parse_final_answer

_LOG = get_logger(__name__)
_EXAMINATION_S = 5.0


@dataclass(slots=True)
class _PendingCall:
    """One call in progress: calls of the environment, nearly always one. `place` is that of the
    one in progress, which `attempts` and `took_s`, of its last attempt, are about. `sent_at` is
    when the first one first held a place; `unknown` is set once a failed attempt may have changed
    something."""

    session: Session
    made: PolicyCall
    steps: Sequence[ScreenStep]
    until: float
    place: int = 0
    attempts: int = 0
    sent_at: float | None = None
    took_s: float = 0.0
    unknown: bool = False

    @property
    def step(self) -> ScreenStep:
        return self.steps[self.place]

    @property
    def is_read_only(self) -> bool:
        return self.step.tool.read_only or self.step.looks


class ToolCaller:
    """Runs each call to its answer; never raises for the behaviour of an environment."""

    def __init__(self, config: EnvGatewayConfig) -> None:
        self.gates = CallGates(config)
        self._retry = config.retry
        self._max_unreachable = config.breaker.instance_failures
        # By environment: one that fails must not spend what the others may need.
        self.budgets: dict[str, RetryBudget] = {}

    async def run_call(
        self,
        session: Session,
        call_seq: int,
        name: str,
        arguments_json: str,
        timeout_s: float,
        place: TurnPlace,
    ) -> CallAnswer:
        """Run a call in its turn, by its place in the session's line."""
        started = loop_time()
        tool = session.tools.get(name)
        if tool is None:
            return _text_answer(ToolOutcome.BAD_TOOL, f"unknown tool {name[:100]!r}")
        try:
            arguments = await run_aside(
                len(arguments_json), lambda: _parse_arguments(session, arguments_json)
            )
            if tool is SUBMIT_FINAL_ANSWER:
                # Not an environment's tool of the same name.
                return _record_submission(session, parse_final_answer(arguments))
            planned = _plan_call(session, tool, arguments)
        except TaskError as error:
            return _text_answer(ToolOutcome.BAD_ARGUMENTS, str(error))
        if planned.done:
            return replace(_text_answer(ToolOutcome.OK, "The episode has ended."), done=True)
        steps = planned.steps
        # As the environment gets it, if that is one call.
        made = (steps[0].tool, steps[0].arguments) if len(steps) == 1 else (tool, arguments)
        until = min(started + timeout_s, session.episode.ends_at)
        call = _PendingCall(session, PolicyCall(call_seq, *made), steps, until)
        answer = await self._answer_in_turn(call, place)
        parts = answer.parts
        if session.screen is not None:
            parts = await session.screen.convert_parts(parts)
        sent_at = call.sent_at or loop_time()
        return replace(
            answer,
            parts=await session.media.store_large_parts(parts),
            queue_s=sent_at - started,
            upstream_s=loop_time() - sent_at,
        )

    def _budget_of(self, env_key: str) -> RetryBudget:
        if env_key not in self.budgets:
            retry = self._retry
            self.budgets[env_key] = RetryBudget(ratio=retry.budget_ratio, cap=retry.budget_cap)
        return self.budgets[env_key]

    async def _answer_in_turn(self, call: _PendingCall, place: TurnPlace) -> CallAnswer:
        session = call.session
        try:
            async with session.line.hold_turn(place, call.until):
                answer = await self._settle(call, lambda: self._run_steps(call))
                # A grade waits for its turn, and then knows what was shown.
                await session.passed_text.note_parts(answer.parts)
        except TimeoutError:
            return await self._settle(call, lambda: _answer_late(call))
        return answer

    async def _settle(
        self, call: _PendingCall, run: Callable[[], Awaitable[CallAnswer]]
    ) -> CallAnswer:
        """Return the answer that `run` makes, or that of a replayed world, with what it means for
        the episode."""
        session, instance = call.session, call.session.instance
        assert instance is not None, "an episode with calls has one"
        answer = await instance.settle_call(call.made, run)
        session.record.note_call(call.made, answer)
        if answer.outcome is ToolOutcome.SESSION_LOST:
            session.mark_lost(
                " ".join(part.text for part in answer.parts if isinstance(part, Text))
            )
        session.episode.tainted |= answer.outcome is ToolOutcome.OUTCOME_UNKNOWN
        return answer

    async def _run_steps(self, call: _PendingCall) -> CallAnswer:
        """Run the environment's calls in order, up to one that fails; the last one answers."""
        answer = await self._run_attempts(call)
        while answer.outcome is ToolOutcome.OK and call.place + 1 < len(call.steps):
            before = answer.attempts
            call.place, call.attempts = call.place + 1, 0
            answer = await self._run_attempts(call)
            answer = replace(answer, attempts=answer.attempts + before)
        if answer.outcome is not ToolOutcome.OK and call.place:
            note = f"({call.place} of {len(call.steps)} parts of this action were done)"
            answer = replace(answer, parts=(*answer.parts, Text(note)))
        return answer

    async def _run_attempts(self, call: _PendingCall) -> CallAnswer:
        """Try the present step until it is answered or given up."""
        session, tool = call.session, call.step.tool
        if session.instance is None or session.episode.lost:
            return _text_answer(ToolOutcome.SESSION_LOST, "the environment instance is gone")
        if tool.name in session.vanished:
            message = f"the environment has removed its tool {tool.name[:100]!r}"
            return _text_answer(ToolOutcome.TOOL_ERROR, message)
        backoff = Backoff(base_s=self._retry.base_s, cap_s=self._retry.cap_s)
        budget = self._budget_of(session.env_key)
        budget.deposit()
        while True:
            try:
                result = await self._run_attempt(call, session.instance)
            except TimeoutError:
                # It got no place in time.
                return _deadline_answer(call)
            except BackendError as failure:
                call.unknown |= failure.delivered is None and not call.is_read_only
                error = await self._examine_instance(call, session.instance, failure)
                decision = decide_retry(
                    error,
                    repeatable=tool.is_repeatable or call.is_read_only,
                    unknown=call.unknown,
                    remaining_s=call.until - loop_time(),
                    took_s=call.took_s,
                    backoff=backoff,
                    budget=budget,
                )
                if decision.wait_s is None:
                    return _unanswered(call, decision.outcome, str(error))
                await asyncio.sleep(decision.wait_s)
            else:
                session.unreachable = 0
                outcome = ToolOutcome.TOOL_ERROR if result.is_error else ToolOutcome.OK
                return CallAnswer(outcome, result.parts, result.reward, result.done, call.attempts)

    async def _run_attempt(self, call: _PendingCall, instance: Instance) -> CallResult:
        async with self.gates.hold_call_place(call.session, call.step.tool.name, call.until):
            now = loop_time()
            if call.attempts and call.until - now <= call.took_s:
                raise TimeoutError
            call.sent_at = call.sent_at or now
            call.attempts += 1
            name = call.step.tool.name
            try:
                result = await instance.call_tool(
                    name, call.step.arguments, timeout_s=max(0.001, call.until - now)
                )
            except BackendError as error:
                call.took_s = loop_time() - now
                event_metrics.upstream_attempts(call.session.env_key, error.kind)()
                raise
            except Exception as error:
                # An answer that no adapter foresaw, or an embedded environment's fault: the call
                # may have been executed, and a worker would repeat it on an internal error.
                _LOG.exception(
                    "call_failed", instance=instance.instance_id, tool=call.step.tool.name
                )
                raise BackendError("internal", repr(error)[:500], delivered=None) from error
            event_metrics.upstream_attempts(call.session.env_key, "ok")()
            return result

    async def _examine_instance(
        self, call: _PendingCall, instance: Instance, error: BackendError
    ) -> BackendError:
        """Query the backend, after several consecutive failures to reach the instance, whether
        it still runs: there is no point in waiting for one that does not. Return the failure,
        as a lost instance if it is gone."""
        session = call.session
        session.unreachable = session.unreachable + 1 if error.unreachable else 0
        if session.unreachable < self._max_unreachable:
            return error
        session.unreachable = 0
        timeout_s = min(_EXAMINATION_S, seconds_left(call.until))
        try:
            if await instance.is_alive(timeout_s=timeout_s):
                return error
        except BackendError as unknown:
            _LOG.info("instance_not_examined", instance=instance.instance_id, error=str(unknown))
            return error
        message = f"the environment does not run any more; last seen: {error}"
        return BackendError("lost", message, delivered=error.delivered, lost=True)


async def _answer_late(call: _PendingCall) -> CallAnswer:
    return _deadline_answer(call)


def _deadline_answer(call: _PendingCall) -> CallAnswer:
    """Answer a call whose time is over while it waits for its turn or for a place."""
    if call.unknown:
        return _unanswered(call, ToolOutcome.OUTCOME_UNKNOWN, "its time is over")
    if call.attempts:
        message = "the environment refused the call until its deadline"
        return _unanswered(call, ToolOutcome.SESSION_LOST, message)
    message = "the call waited for its turn until its deadline"
    return _unanswered(call, ToolOutcome.DEADLINE, message)


def _unanswered(call: _PendingCall, outcome: ToolOutcome, message: str) -> CallAnswer:
    return replace(_text_answer(outcome, message), attempts=call.attempts)


def _parse_arguments(session: Session, arguments_json: str) -> dict[str, Any]:
    """Parse a call's arguments. Raises TaskError."""
    arguments = load_json_object(arguments_json or "{}", "arguments")
    session.passed_text.note_call(arguments)
    return arguments


def _plan_call(session: Session, tool: Tool, arguments: Mapping[str, Any]) -> ScreenCall:
    """Return the environment's calls that a policy's call means. Raises TaskError."""
    screen = session.screen
    if screen is not None and screen.offered.get(tool.name) is tool:
        return screen.plan_call(tool.name, arguments)
    return ScreenCall((ScreenStep(tool, arguments),))


def _record_submission(session: Session, answer: str) -> CallAnswer:
    session.final_answer = answer
    return CallAnswer(ToolOutcome.OK, (Text("The final answer was submitted."),), done=True)


def _text_answer(outcome: ToolOutcome, message: str) -> CallAnswer:
    return CallAnswer(outcome, (Text(message),))
