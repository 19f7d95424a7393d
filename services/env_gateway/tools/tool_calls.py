"""Executes tool calls: limits, deadline, retries where they are safe."""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from services.common.log import get_logger
from services.common.parsing import aside
from services.env_gateway.api import prometheus
from services.env_gateway.config.gateway import EnvGatewayConfig, RetryConfig
from services.env_gateway.episodes.session import Answer, Outcome, Session
from services.env_gateway.episodes.task_format import TaskError, load_object
from services.env_gateway.limits.adaptive_concurrency import AdaptiveLimit, Breaker, FixedLimit
from services.env_gateway.limits.backend_health import Observer
from services.env_gateway.limits.gates import Gate
from services.env_gateway.ports import BackendError, CallResult, Instance, Text, Tool, Watched
from services.env_gateway.tools.computer_tool import only_looks
from services.env_gateway.tools.retry_policy import Backoff, Decision, RetryBudget, Verdict, decide
from services.env_gateway.tools.tool_selection import COMPUTER, final_answer, is_final_answer

_LOG = get_logger(__name__)
_EXAMINATION_S = 5.0
_OUTCOMES = {
    Verdict.NOT_EXECUTED: Outcome.NOT_EXECUTED,
    Verdict.OUTCOME_UNKNOWN: Outcome.OUTCOME_UNKNOWN,
    Verdict.DEADLINE: Outcome.DEADLINE,
    Verdict.SESSION_LOST: Outcome.SESSION_LOST,
    Verdict.BAD_ARGUMENTS: Outcome.BAD_ARGUMENTS,
}


class CallGates:
    """How many calls are in flight: one gate for each environment, and one for all of them.

    Instances that are not ready yet are asked through gates of their own, since what they fail to
    answer says nothing of the others; these have half of the places, so that calls go on.
    """

    def __init__(self, config: EnvGatewayConfig) -> None:
        self._config = config
        self.warming_by_env: dict[str, Gate] = {}
        self.all = Gate(FixedLimit(config.limits.max_calls), weight_of=config.weight_of)
        self.by_env: dict[str, Gate] = {}

    def gate(self, env_key: str, *, apart: bool = False) -> Gate:
        """`apart`: each instance is a machine or a process of its own."""
        gate = self.by_env.get(env_key)
        if gate is None:
            config = self._config
            breaker = config.breaker
            gate = self.by_env[env_key] = Gate(
                AdaptiveLimit(
                    start=config.limits.start_calls, ceiling=config.max_calls_of(env_key)
                ),
                Breaker(
                    window=breaker.window, error_rate=breaker.error_rate, open_s=breaker.open_s
                ),
                observer=Observer(config.usual_time(config.call_timeout_s), apart=apart),
                weight_of=config.weight_of,
            )
        return gate

    def warming_gate(self, env_key: str, *, apart: bool) -> Gate:
        gate = self.warming_by_env.get(env_key)
        if gate is None:
            config = self._config
            ceiling = max(1, config.max_calls_of(env_key) // 2)
            gate = self.warming_by_env[env_key] = Gate(
                AdaptiveLimit(start=config.limits.start_calls, ceiling=ceiling),
                observer=Observer(config.usual_time(config.open_timeout_s), apart=apart),
                weight_of=config.weight_of,
            )
        return gate

    def passing(
        self, session: Session, kind: str, until: float
    ) -> AbstractAsyncContextManager[None]:
        """Wait for a place; TimeoutError at `until`. Raises BackendError."""
        gate = self.gate(session.env_key, apart=session.backend.apart)
        return self._through(gate, session, kind, until)

    def warming(
        self, session: Session, kind: str, until: float
    ) -> AbstractAsyncContextManager[None]:
        """The same for a request to an instance that may not be ready yet."""
        gate = self.warming_gate(session.env_key, apart=session.backend.apart)
        return self._through(gate, session, kind, until)

    @asynccontextmanager
    async def _through(
        self, gate: Gate, session: Session, kind: str, until: float
    ) -> AsyncGenerator[None]:
        run_id = session.run_id
        instance_id = session.instance.instance_id if session.instance else ""
        async with (
            gate.passing(run_id, until, kind=kind, instance_id=instance_id) as passage,
            self.all.passing(run_id, until),
        ):
            passage.sent()
            yield


@dataclass(slots=True)
class _Call:
    """`sent_at` is when it first had a place; `unknown` whether an attempt that failed may have
    changed something."""

    session: Session
    tool: Tool
    arguments: Mapping[str, Any]
    until: float
    attempts: int = 0
    sent_at: float | None = None
    unknown: bool = False

    @property
    def reads(self) -> bool:
        return self.tool.read_only or only_looks(self.tool.name, self.arguments)


class Caller:
    """Runs one call to its answer; never raises for what an environment does."""

    def __init__(self, config: EnvGatewayConfig, rng: random.Random) -> None:
        self.gates = CallGates(config)
        self._retry = config.retry
        self._max_unreachable = config.breaker.instance_failures
        self.budget = retry_budget(config.retry)
        self._rng = rng

    async def run(
        self, session: Session, name: str, arguments_json: str, timeout_s: float
    ) -> Answer:
        started = _now()
        tool = session.tools.get(name)
        if tool is None:
            return _told(Outcome.BAD_TOOL, f"unknown tool {name[:100]!r}")
        try:
            arguments = await aside(
                len(arguments_json), lambda: _arguments(session, tool, arguments_json)
            )
            session.writings.called(tool.name, arguments)
            if is_final_answer(tool):
                return _submitted(session, final_answer(arguments))
        except TaskError as error:
            return _told(Outcome.BAD_ARGUMENTS, str(error))
        until = min(started + timeout_s, session.episode.ends_at)
        call = _Call(session, tool, arguments, until)
        try:
            async with _turn(session, until):
                answer = await self._attempts(call)
                # A grade waits for its turn, and then knows what was shown.
                await session.note(answer.parts)
        except TimeoutError:
            answer = _out_of_time(call)
        parts = answer.parts
        if session.screen is not None:
            parts = await session.screen.shown_parts(parts)
        sent_at = call.sent_at or _now()
        return replace(
            answer,
            parts=await session.media.keep(parts),
            queue_s=sent_at - started,
            upstream_s=_now() - sent_at,
        )

    async def _attempts(self, call: _Call) -> Answer:
        """Raises TimeoutError when there is no place for the call in time."""
        session, tool = call.session, call.tool
        if session.instance is None or session.episode.lost:
            return _told(Outcome.SESSION_LOST, "the environment instance is gone")
        backoff = new_backoff(self._retry, self._rng)
        self.budget.deposit()
        while True:
            try:
                result = await self._attempt(call, session.instance)
            except BackendError as failure:
                call.unknown |= failure.delivered is None and not call.reads
                error = await self._examined(call, session.instance, failure)
                decision = decide(
                    error,
                    repeatable=tool.repeatable or call.reads,
                    unknown=call.unknown,
                    remaining_s=call.until - _now(),
                    backoff=backoff,
                    budget=self.budget,
                )
                if decision.wait_s is None:
                    return _failed(call, error, decision)
                await asyncio.sleep(decision.wait_s)
            else:
                session.unreachable = 0
                outcome = Outcome.TOOL_ERROR if result.is_error else Outcome.OK
                return Answer(outcome, result.parts, result.reward, result.done, call.attempts)

    async def _attempt(self, call: _Call, instance: Instance) -> CallResult:
        async with self.gates.passing(call.session, call.tool.name, call.until):
            now = _now()
            call.sent_at = call.sent_at or now
            call.attempts += 1
            try:
                result = await instance.call(
                    call.tool.name, call.arguments, timeout_s=max(0.001, call.until - now)
                )
            except BackendError as error:
                prometheus.attempted(call.session.env_key, error.kind)()
                raise
            except Exception as error:
                # An answer that no adapter foresaw, or an embedded environment's fault: the call
                # may have been executed, and is not to be repeated by a worker that sees an
                # internal error.
                _LOG.exception("call_failed", instance=instance.instance_id, tool=call.tool.name)
                raise BackendError("internal", repr(error)[:500], delivered=None) from error
            prometheus.attempted(call.session.env_key, "ok")()
            return result

    async def _examined(self, call: _Call, instance: Instance, error: BackendError) -> BackendError:
        """After some failures in a row to reach an instance, ask its backend whether it is there:
        there is nothing to wait for when it is not."""
        session = call.session
        session.unreachable = session.unreachable + 1 if error.unreachable else 0
        if session.unreachable < self._max_unreachable or not isinstance(instance, Watched):
            return error
        session.unreachable = 0
        timeout_s = min(_EXAMINATION_S, max(0.001, call.until - _now()))
        try:
            if await instance.alive(timeout_s=timeout_s):
                return error
        except BackendError as unknown:
            _LOG.info("instance_not_examined", instance=instance.instance_id, error=str(unknown))
            return error
        message = f"the environment does not run any more; last seen: {error}"
        return BackendError("lost", message, delivered=error.delivered, lost=True)


@asynccontextmanager
async def _turn(session: Session, until: float) -> AsyncGenerator[None]:
    """One call of an episode at a time, in order of arrival; TimeoutError at `until`."""
    await _acquire(session.turn, until)
    try:
        yield
    finally:
        session.turn.release()


async def _acquire(place: asyncio.Semaphore, until: float) -> None:
    """Raises TimeoutError at `until`."""
    if not place.locked():
        # No wait, and no timer for it.
        await place.acquire()
        return
    async with asyncio.timeout_at(until):
        await place.acquire()


def _failed(call: _Call, error: BackendError, decision: Decision) -> Answer:
    outcome = _OUTCOMES[decision.verdict]
    episode = call.session.episode
    episode.lost |= error.lost
    episode.tainted |= outcome is Outcome.OUTCOME_UNKNOWN
    return replace(_told(outcome, str(error)), attempts=call.attempts)


def _out_of_time(call: _Call) -> Answer:
    call.session.episode.tainted |= call.unknown
    outcome = Outcome.OUTCOME_UNKNOWN if call.unknown else Outcome.DEADLINE
    message = "the call waited for its turn until its deadline"
    return replace(_told(outcome, message), attempts=call.attempts)


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
