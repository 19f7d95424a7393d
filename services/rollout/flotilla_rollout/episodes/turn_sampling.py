"""One turn of the policy, sampled within the attempt's time and tokens."""

import asyncio
import time
from dataclasses import replace
from types import TracebackType

from flotilla_common.telemetry import trace
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_rollout.episodes.attempt_limits import AttemptLimits, TurnBudget
from flotilla_rollout.episodes.attempt_record import AttemptState
from flotilla_rollout.episodes.thinking_budget import ThinkingBudget
from flotilla_rollout.ports import Dialect, Engine
from flotilla_rollout.types import Completion, Sampling, join_completions

# An engine that has not returned its turn so long after the deadline has lost it.
ENGINE_GRACE_S = 5.0
_GENERATE = "generate"


class OutOfTime(Exception):
    """The attempt's time ran out, but not while the policy was writing."""


class TurnSampler:
    """Sampler of turns for any number of concurrent attempts."""

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        limits: AttemptLimits,
        watchdog: Watchdog,
    ) -> None:
        self._engine = engine
        self._thinking = ThinkingBudget(dialect, limits.thinking_tokens)
        self._limits = limits
        self._watchdog = watchdog

    async def sample_turn(
        self, state: AttemptState, sampling: Sampling
    ) -> tuple[Completion, TurnBudget]:
        """Append one turn, in as many requests as it takes, and return it with the budget that
        bounds its end.

        A turn without tokens ran out of time before the first. Raises OutOfTime and EngineError."""
        transcript, pieces = state.transcript, list[Completion]()
        written: list[int] = []
        while True:
            budget = self._limits.turn_budget(len(transcript), transcript.sampled, len(written))
            if budget.tokens < 1:
                return join_completions(pieces), budget
            most = self._thinking.bound_request(written, budget.tokens)
            piece = await self._generate_piece(state, sampling, most)
            room = budget.tokens - len(piece.token_ids)
            written += piece.token_ids.tolist()
            state.counts.mended_candidates += piece.mended
            end = self._thinking.make_end(written, room) if piece.cut else None
            for each in (piece, end) if end is not None else (piece,):
                transcript.add_completion(each, sampling.temperature)
                pieces.append(each)
            written += end.token_ids.tolist() if end is not None else []
            # After the thinking's limit the turn continues: this is not a cut of the turn.
            over = most == budget.tokens and end is None
            if not piece.cut or (over and not budget.continues):
                return join_completions(pieces), budget

    async def _generate_piece(
        self, state: AttemptState, sampling: Sampling, most: int
    ) -> Completion:
        """Sample in a watchdog stage: the engine is stalled if no request of any attempt ends.

        The engine itself keeps the deadline: tokens sampled until then are the policy's like all
        others."""
        transcript, left = state.transcript, max(state.ends - time.monotonic(), 0.0)
        if transcript.known_experts:
            # If a request recomputes experts, the first answer counts: the later tokens follow it.
            sampling = replace(sampling, experts_from=transcript.known_experts)
        stage, facts = self._watchdog.stage(_GENERATE), {"tokens": len(transcript)}
        with stage, trace.span(_GENERATE, facts):
            async with self.within_time(state, ENGINE_GRACE_S):
                completion = await self._engine.generate(
                    transcript.for_engine(), sampling, most, left, transcript.pictures
                )
        self._watchdog.note_progress(_GENERATE)
        state.waited_s += completion.waited_s
        return completion

    def within_time(self, state: AttemptState, grace_s: float = 0.0) -> "_TimeLeft":
        """Raise OutOfTime if the attempt's time ends before the block."""
        return _TimeLeft(max(state.ends - time.monotonic(), 0.0) + grace_s)


class _TimeLeft:
    """Scope that ends with OutOfTime. A class, because every turn enters two."""

    __slots__ = ("_scope",)

    def __init__(self, seconds: float) -> None:
        self._scope = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # It only converts its own timeout; a TimeoutError of the block passes through.
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise OutOfTime from None
