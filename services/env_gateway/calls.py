"""Executes tool calls: limits, deadline, retries where they are safe."""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from services.common.log import get_logger
from services.env_gateway.computer import only_looks
from services.env_gateway.config import EnvGatewayConfig, RetryConfig
from services.env_gateway.offer import COMPUTER, final_answer, is_final_answer
from services.env_gateway.ports import BackendError, CallResult, Instance, Text, Tool
from services.env_gateway.retry import Backoff, Decision, RetryBudget, Verdict, decide
from services.env_gateway.session import Answer, Outcome, Session
from services.env_gateway.tasks import TaskError, load_object

_LOG = get_logger(__name__)
_OUTCOMES = {
    Verdict.NOT_EXECUTED: Outcome.NOT_EXECUTED,
    Verdict.OUTCOME_UNKNOWN: Outcome.OUTCOME_UNKNOWN,
    Verdict.DEADLINE: Outcome.DEADLINE,
    Verdict.SESSION_LOST: Outcome.SESSION_LOST,
    Verdict.BAD_ARGUMENTS: Outcome.BAD_ARGUMENTS,
}


class CallSlots:
    """How many calls are in flight: one per episode, some per environment, some in all."""

    def __init__(self, config: EnvGatewayConfig) -> None:
        self._all = asyncio.Semaphore(config.limits.max_calls)
        self._by_env = {
            env_key: asyncio.Semaphore(environment.max_calls)
            for env_key, environment in config.environments.items()
            if environment.max_calls is not None
        }

    @asynccontextmanager
    async def hold(self, session: Session, *, until: float) -> AsyncGenerator[None]:
        """Wait for the call's turn, in order of arrival; TimeoutError at `until`."""
        by_env = self._by_env.get(session.env_key) or nullcontext()
        async with asyncio.timeout_at(until) as waiting, session.turn, by_env, self._all:
            waiting.reschedule(None)
            yield


class Caller:
    """Runs one call to its answer; never raises for what an environment does."""

    def __init__(self, config: EnvGatewayConfig, rng: random.Random) -> None:
        self.slots = CallSlots(config)
        self._retry = config.retry
        self._budget = retry_budget(config.retry)
        self._rng = rng

    async def run(
        self, session: Session, name: str, arguments_json: str, timeout_s: float
    ) -> Answer:
        started = _now()
        until = min(started + timeout_s, session.episode.ends_at)
        tool = session.tools.get(name)
        if tool is None:
            return _told(Outcome.BAD_TOOL, f"unknown tool {name[:100]!r}")
        try:
            arguments = _arguments(session, tool, arguments_json)
            if is_final_answer(tool):
                return _submitted(session, final_answer(arguments))
        except TaskError as error:
            return _told(Outcome.BAD_ARGUMENTS, str(error))
        try:
            async with self.slots.hold(session, until=until):
                queue_s = _now() - started
                answer = await self._attempts(session, tool, arguments, until)
        except TimeoutError:
            return replace(
                _told(Outcome.DEADLINE, "the call waited for its turn until its deadline"),
                queue_s=_now() - started,
            )
        parts = answer.parts
        if session.screen is not None:
            parts = await session.screen.shown_parts(parts)
        parts = session.media.keep(parts)
        return replace(answer, parts=parts, queue_s=queue_s, upstream_s=_now() - started - queue_s)

    async def _attempts(
        self, session: Session, tool: Tool, arguments: Mapping[str, Any], until: float
    ) -> Answer:
        instance = session.instance
        if instance is None or session.episode.lost:
            return _told(Outcome.SESSION_LOST, "the environment instance is gone")
        backoff = new_backoff(self._retry, self._rng)
        self._budget.deposit()
        attempts = 0
        while True:
            attempts += 1
            try:
                result = await _attempt(instance, tool.name, arguments, until)
            except BackendError as error:
                decision = decide(
                    error,
                    repeatable=tool.repeatable or only_looks(tool.name, arguments),
                    remaining_s=until - _now(),
                    backoff=backoff,
                    budget=self._budget,
                )
                if decision.wait_s is None:
                    return _failed(session, error, decision, attempts)
                await asyncio.sleep(decision.wait_s)
            else:
                outcome = Outcome.TOOL_ERROR if result.is_error else Outcome.OK
                return Answer(outcome, result.parts, result.reward, result.done, attempts)


async def _attempt(
    instance: Instance, name: str, arguments: Mapping[str, Any], until: float
) -> CallResult:
    remaining_s = until - _now()
    if remaining_s <= 0:
        raise BackendError("timeout", "no time left for the call", delivered=False)
    try:
        return await instance.call(name, arguments, timeout_s=remaining_s)
    except BackendError:
        raise
    except Exception as error:
        # An answer that no adapter foresaw, or an embedded environment's fault: the call may have
        # been executed, and is not to be repeated by a worker that sees an internal error.
        _LOG.exception("call_failed", instance=instance.instance_id, tool=name)
        raise BackendError("internal", repr(error)[:500], delivered=None) from error


def _failed(session: Session, error: BackendError, decision: Decision, attempts: int) -> Answer:
    outcome = _OUTCOMES[decision.verdict]
    session.episode.lost |= error.lost
    session.episode.tainted |= outcome is Outcome.OUTCOME_UNKNOWN
    return replace(_told(outcome, str(error)), attempts=attempts)


def _arguments(session: Session, tool: Tool, arguments_json: str) -> dict[str, Any]:
    """Raises TaskError."""
    arguments = load_object(arguments_json or "{}", "arguments")
    if session.screen is not None and tool.name == COMPUTER:
        return session.screen.to_pixels(arguments)
    return arguments


def _submitted(session: Session, answer: str) -> Answer:
    session.final_answer = answer
    return Answer(Outcome.OK, (Text("The final answer was submitted."),), done=True)


def _told(outcome: Outcome, message: str) -> Answer:
    return Answer(outcome, (Text(message),))


def new_backoff(config: RetryConfig, rng: random.Random) -> Backoff:
    return Backoff(base_s=config.base_s, cap_s=config.cap_s, rng=rng)


def retry_budget(config: RetryConfig) -> RetryBudget:
    return RetryBudget(ratio=config.budget_ratio, cap=config.budget_cap)


def _now() -> float:
    return asyncio.get_running_loop().time()
