"""The open samplers: their weights through time, and who answers whose requests."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import grpc

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import running_tasks
from flotilla_rollout.ports import RequestAborted
from flotilla_rollout.sampling.order_checks import EngineLimits, check_order
from flotilla_rollout.sampling.ports import SamplingEngine
from flotilla_rollout.sampling.refusals import bad_request, refuse, refusing_unfit
from flotilla_rollout.sampling.types import (
    EngineAnswer,
    NamedWeights,
    PromptAnswer,
    PromptReport,
    RequestWeights,
    SamplingOrder,
    SamplingOutcome,
)
from flotilla_rollout.sampling.weight_folders import (
    Shapes,
    check_adapter_folder,
    check_model_folder,
)
from flotilla_rollout.sampling.weight_turns import WeightTurns

# Turns of the base weights and of all adapters beside them.
BASE = 0
# Starts of a request that newer weights than intended began each time.
MAX_STARTS = 4


@dataclass(slots=True)
class Sampler:
    """An open sampler, and the weights that it has had."""

    # Of its adapter in the engine, or of its turns; never used again.
    number: int
    weights: NamedWeights
    # The engine's state from which on it has had each weights, and their labels.
    states: list[int]
    labels: list[str]
    running: int = 0
    closed: bool = False

    def phase_at(self, state: int) -> int:
        """Return the index of the weights that it had in a state of the engine."""
        return bisect_right(self.states, state) - 1

    @property
    def turn(self) -> int:
        return self.number if self.weights.kind == "model" else BASE

    @property
    def for_request(self) -> RequestWeights:
        if self.weights.kind == "base":
            return RequestWeights(0, "base")
        adapter = self.number if self.weights.kind == "adapter" else 0
        return RequestWeights(adapter, f"{self.number}.{len(self.states)}")


@dataclass(frozen=True, slots=True)
class SamplerRoom:
    """The room for samplers: how many, the engine's base, and adapters beside it."""

    max_samplers: int
    max_rank: int
    # Adapters that answer concurrently.
    max_active: int
    base_folder: Path
    base: Shapes = field(repr=False)


class Samplers:
    """All samplers of one engine. Methods raise ServiceError as the contract lists them, and
    EngineDead."""

    def __init__(self, engine: SamplingEngine, room: SamplerRoom, limits: EngineLimits) -> None:
        self.room = room
        self.limits = limits
        self._engine = engine
        self._open: dict[str, Sampler] = {}
        # Closed ones whose requests run on.
        self._closing: set[int] = set()
        # Those of whole models, by number, closing ones included.
        self._models: dict[int, Sampler] = {}
        self._last_number = BASE
        self._loaded = BASE
        self._turns = WeightTurns(self._load_turn, 1, (BASE,))
        # vLLM would let requests to adapters in its places overtake all others.
        self._places = WeightTurns(_load_nothing, room.max_active)
        # Weights are changed by one call at a time, and never by half.
        self._changing = asyncio.Lock()
        self._work = BackgroundTasks()

    @property
    def ids(self) -> Sequence[str]:
        return tuple(self._open)

    async def open_sampler(self, sampler_id: str, weights: NamedWeights) -> None:
        await self._work.run_shielded(self._open_sampler(sampler_id, weights))

    async def replace_weights(self, sampler_id: str, weights: NamedWeights) -> None:
        await self._work.run_shielded(self._replace_weights(sampler_id, weights))

    async def close_sampler(self, sampler_id: str) -> None:
        if (sampler := self._open.pop(sampler_id, None)) is None:
            return
        sampler.closed = True
        self._closing.add(sampler.number)
        if not sampler.running:
            await self._work.run_shielded(self._forget(sampler))

    async def sample(self, sampler_id: str, order: SamplingOrder) -> SamplingOutcome:
        check_order(order, self.limits)
        sampler = self._find(sampler_id)
        adapted = sampler.weights.kind == "adapter"
        place = self._places.take_turn(sampler.number) if adapted else nullcontext()
        async with self._in_use(sampler), self._turns.take_turn(sampler.turn), place:
            report = await self._score(sampler, order) if _wants_report(order) else None
            first = order.first_answer
            numbers = range(first, first + order.num_samples)
            work = (self._sample(sampler, order, number) for number in numbers)
            async with running_tasks(*work) as tasks:
                answers = await asyncio.gather(*tasks)
        # The answers' cache is the report's own work.
        cached = answers[0].cached if answers and report is None else 0
        return SamplingOutcome([_label_spans(sampler, each) for each in answers], report, cached)

    def _find(self, sampler_id: str) -> Sampler:
        if (sampler := self._open.get(sampler_id)) is None:
            raise refuse(
                grpc.StatusCode.NOT_FOUND,
                "SAMPLER_UNKNOWN",
                f"there is no sampler {sampler_id!r} here: open it (again)",
            )
        return sampler

    async def _open_sampler(self, sampler_id: str, weights: NamedWeights) -> None:
        async with self._changing:
            if (sampler := self._open.get(sampler_id)) is not None:
                if sampler.weights == weights:
                    return
                raise refuse(
                    grpc.StatusCode.ALREADY_EXISTS,
                    "SAMPLER_EXISTS",
                    f"sampler {sampler_id!r} has the weights {sampler.weights.label!r}",
                )
            if len(self._open) + len(self._closing) >= self.room.max_samplers:
                raise refuse(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "TOO_MANY_SAMPLERS",
                    f"{self.room.max_samplers} samplers are open or end their last requests"
                    " (rollout.sampling.max_samplers): close one",
                )
            await self._check_folder(weights)
            self._last_number += 1
            number, state = self._last_number, self._engine.state
            if weights.kind == "adapter":
                with refusing_unfit():
                    await self._engine.add_adapter(number, weights.folder)
            sampler = Sampler(number, weights, [state], [weights.label])
            self._open[sampler_id] = sampler
            if weights.kind == "model":
                self._models[number] = sampler

    async def _replace_weights(self, sampler_id: str, weights: NamedWeights) -> None:
        async with self._changing:
            sampler = self._find(sampler_id)
            if sampler.weights == weights:
                return
            if weights.kind != sampler.weights.kind or weights.kind == "base":
                raise bad_request(
                    f"weights: sampler {sampler_id!r} has weights of kind {sampler.weights.kind},"
                    f" which {weights.kind} cannot replace: open another sampler"
                )
            await self._check_folder(weights)
            await self._put(sampler, weights)

    async def _put(self, sampler: Sampler, weights: NamedWeights) -> None:
        """Give a sampler new weights, which its running requests continue with."""

        def adopt() -> None:
            sampler.states.append(self._engine.state)
            sampler.labels.append(weights.label)
            sampler.weights = weights

        if weights.kind == "adapter":
            with refusing_unfit():
                await self._engine.replace_adapter(sampler.number, weights.folder, adopt)
        elif self._loaded == sampler.number:
            await self._engine.load_model(weights.folder, adopt)
        else:
            # Its next turn loads them.
            adopt()

    async def _check_folder(self, weights: NamedWeights) -> None:
        if weights.kind == "adapter" and not self.room.max_rank:
            raise bad_request(
                "weights: this engine has no room for adapters (rollout.sampling.max_rank = 0)"
            )
        with refusing_unfit():
            if weights.kind == "adapter":
                await asyncio.to_thread(
                    check_adapter_folder, weights.folder, self.room.base, self.room.max_rank
                )
            elif weights.kind == "model":
                await asyncio.to_thread(check_model_folder, weights.folder, self.room.base)

    async def _load_turn(self, turn: int) -> None:
        """Load the base, or the whole model of a sampler, while no request runs."""
        async with self._changing:
            folder = self.room.base_folder
            if turn != BASE:
                weights = self._models[turn].weights
                # It may have been removed since.
                await self._check_folder(weights)
                folder = weights.folder

            def adopt() -> None:
                self._loaded = turn

            await self._engine.load_model(folder, adopt)

    @asynccontextmanager
    async def _in_use(self, sampler: Sampler) -> AsyncGenerator[None]:
        """Keep the sampler's weights in the block, even if it is closed."""
        sampler.running += 1
        try:
            yield
        finally:
            sampler.running -= 1
            if sampler.closed and not sampler.running:
                self._work.start_task(self._forget(sampler))

    async def _forget(self, sampler: Sampler) -> None:
        async with self._changing:
            if sampler.weights.kind == "adapter":
                await self._engine.remove_adapter(sampler.number)
            self._models.pop(sampler.number, None)
            self._closing.discard(sampler.number)

    async def _sample(self, sampler: Sampler, order: SamplingOrder, index: int) -> EngineAnswer:
        for _ in range(MAX_STARTS):
            async with self._engine.take_slot():
                phase = len(sampler.states) - 1
                answer = await self._engine.sample_answer(order, index, sampler.for_request)
            if not answer.spans or sampler.phase_at(answer.spans[0][0]) == phase:
                return answer
        raise _too_many_starts()

    async def _score(self, sampler: Sampler, order: SamplingOrder) -> PromptReport:
        for _ in range(MAX_STARTS):
            async with self._engine.take_slot():
                phase = len(sampler.states) - 1
                report, state = await self._engine.score_prompt(order, sampler.for_request)
            if sampler.phase_at(state) == phase:
                return report
        raise _too_many_starts()


async def _load_nothing(_adapter: int) -> None:
    """Leave it to vLLM, which moves adapters between its places by itself."""


def _too_many_starts() -> RequestAborted:
    return RequestAborted(f"the weights changed {MAX_STARTS} times before the request was begun")


def _wants_report(order: SamplingOrder) -> bool:
    return order.prompt_logprobs or order.topk > 0


def _label_spans(sampler: Sampler, answer: EngineAnswer) -> PromptAnswer:
    """Name the weights of an answer's tokens as the sampler's caller does."""
    labelled = [(sampler.labels[sampler.phase_at(state)], count) for state, count in answer.spans]
    spans = tuple(
        (label, sum(count for _, count in group))
        for label, group in groupby(labelled, key=lambda span: span[0])
    )
    return PromptAnswer(answer.token_ids, answer.logprobs, answer.stopped, spans)
