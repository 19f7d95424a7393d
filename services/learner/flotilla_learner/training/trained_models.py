"""The models that callers have created: their ranks, and the order of operations on each.

Operation n on a model is carried out once, after n - 1. The answer to the newest is kept, for a
caller that lost it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.training import TrainingConfig
from flotilla_learner.ports import RankError
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training.serving_ranks import ServingRanks
from flotilla_learner.training_types import AdapterChoice, BaseModel, WrittenFolder

T = TypeVar("T")
_log = get_logger(__name__)
_NAME_CHARACTERS = 256


@dataclass(slots=True)
class TrainedModel:
    """A model, and where its operations stand."""

    name: str
    choice: AdapterChoice
    ranks: ServingRanks
    parameters: int
    # Number of the newest operation, its kind, and its answer.
    operation: int = 0
    newest: tuple[str, Any] | None = None
    # Folders written since it, by kind and path.
    written: dict[tuple[str, Path], WrittenFolder] = field(
        default_factory=dict[tuple[str, Path], WrittenFolder]
    )
    # One request at a time.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class TrainedModels:
    """Models by name. Methods raise OperationRefused."""

    def __init__(
        self, config: TrainingConfig, make_ranks: Callable[[str, bool], ServingRanks]
    ) -> None:
        """`make_ranks` takes a name and whether the base is frozen."""
        self._config = config
        self._make_ranks = make_ranks
        self._models: dict[str, TrainedModel] = {}
        self._starting = asyncio.Lock()
        self._shared: ServingRanks | None = None
        self._started = 0

    @property
    def operations(self) -> dict[str, int]:
        """The newest operation of each model."""
        return {name: model.operation for name, model in self._models.items()}

    async def start_base(self) -> BaseModel:
        """Start the ranks that models with adapters share. Raises RankError."""
        ranks = self._make_ranks("base", True)
        base = await self._start(ranks)
        self._shared = ranks
        return base

    async def create_model(self, name: str, choice: AdapterChoice) -> TrainedModel:
        """Create a model, or return the one of this name and these settings."""
        async with self._starting:
            if (held := self._models.get(name)) is not None:
                if held.choice != choice:
                    raise OperationRefused("MODEL_EXISTS", f"{name!r} exists as {held.choice}")
                return held
            self._check_new(name, choice)
            ranks: ServingRanks | None = None
            try:
                ranks = await self._ranks_for(choice)
                parameters = await ranks.create(name, choice)
            except RankError as error:
                raise await self._lose(ranks, error) from error
            except OperationRefused:
                await self._end_unshared(ranks)
                raise
            model = self._models[name] = TrainedModel(name, choice, ranks, parameters)
            return model

    async def delete_model(self, name: str) -> None:
        """Forget a model after what is being done with it; none of this name is fine."""
        if (model := self._models.get(name)) is None:
            return
        async with model.turn:
            if self._models.pop(name, None) is not model:
                return
            if model.ranks is not self._shared:
                await model.ranks.close()
                return
            try:
                await model.ranks.delete(name)
            except RankError as error:
                await self._lose(model.ranks, error)

    async def carry_out(
        self, name: str, number: int, kind: str, work: Callable[[TrainedModel], Awaitable[T]]
    ) -> T:
        """Carry out operation `number` on a model, or return the newest one's first answer."""
        model = self._find(name)
        async with model.turn:
            self._check_held(model)
            if number == model.operation and model.newest and model.newest[0] == kind:
                return model.newest[1]
            if number != model.operation + 1:
                raise _out_of_order(model, f"operation {number} ({kind})", model.operation + 1)
            answer = await self._work(model, work)
            model.operation, model.newest = number, (kind, answer)
            model.written.clear()
            return answer

    async def read_out(
        self, name: str, work: Callable[[TrainedModel], Awaitable[T]], number: int | None = None
    ) -> T:
        """Do what is no operation; with a number, only if that is the newest operation's."""
        model = self._find(name)
        async with model.turn:
            self._check_held(model)
            if number is not None and number != model.operation:
                raise _out_of_order(model, f"a request after operation {number}", model.operation)
            return await self._work(model, work)

    async def close(self) -> None:
        """End all ranks."""
        ranks = {id(model.ranks): model.ranks for model in self._models.values()}
        self._models.clear()
        if self._shared is not None:
            ranks[id(self._shared)] = self._shared
        await asyncio.gather(*(each.close() for each in ranks.values()))

    async def _work(self, model: TrainedModel, work: Callable[[TrainedModel], Awaitable[T]]) -> T:
        try:
            return await work(model)
        except RankError as error:
            raise await self._lose(model.ranks, error) from error

    def _find(self, name: str) -> TrainedModel:
        if (model := self._models.get(name)) is None:
            raise OperationRefused("MODEL_UNKNOWN", f"there is no model {name!r}: create it")
        return model

    def _check_held(self, model: TrainedModel) -> None:
        """Refuse what has waited for a model that is gone."""
        if self._models.get(model.name) is not model:
            raise OperationRefused("MODEL_UNKNOWN", f"the model {model.name!r} is gone: create it")

    def _check_new(self, name: str, choice: AdapterChoice) -> None:
        most = self._config.max_models
        if not 0 < len(name) <= _NAME_CHARACTERS:
            problem = f"model_id has {len(name)} characters; expected 1 to {_NAME_CHARACTERS}"
            raise OperationRefused("BAD_SETTINGS", problem)
        if not 0 <= choice.rank <= self._config.max_rank:
            largest = f"learner.training.max_rank is {self._config.max_rank}"
            raise OperationRefused("BAD_SETTINGS", f"lora_rank is {choice.rank}, but {largest}")
        if choice.rank and not (choice.attention or choice.mlp):
            problem = "nothing is trained: set train_attention or train_mlp"
            raise OperationRefused("BAD_SETTINGS", problem)
        if len(self._models) >= most:
            problem = f"there are {most} models, learner.training.max_models: delete one"
            raise OperationRefused("TOO_MANY_MODELS", problem)

    async def _ranks_for(self, choice: AdapterChoice) -> ServingRanks:
        if choice.rank > 0:
            if self._shared is None:
                await self.start_base()
            assert self._shared is not None
            return self._shared
        self._started += 1
        ranks = self._make_ranks(f"whole{self._started}", False)
        try:
            await self._start(ranks)
        except RankError as error:
            problem = f"all weights of this base cannot be trained here: {error}"
            raise OperationRefused("BAD_SETTINGS", problem) from error
        return ranks

    async def _start(self, ranks: ServingRanks) -> BaseModel:
        try:
            return await ranks.start()
        except BaseException:
            await ranks.close()
            raise

    async def _end_unshared(self, ranks: ServingRanks | None) -> None:
        if ranks is not None and ranks is not self._shared:
            await ranks.close()

    async def _lose(self, ranks: ServingRanks | None, error: RankError) -> OperationRefused:
        """Forget the models of ranks that are no longer to be trusted, and end those."""
        if ranks is not None:
            lost = [name for name, model in self._models.items() if model.ranks is ranks]
            for name in lost:
                del self._models[name]
            if ranks is self._shared:
                self._shared = None
            _log.error("ranks lost", models=lost, error=str(error))
            await ranks.close()
        return OperationRefused("RANKS_LOST", f"models are gone, create them again: {error}")


def _out_of_order(model: TrainedModel, given: str, expected: int) -> OperationRefused:
    return OperationRefused(
        "OUT_OF_ORDER",
        f"{given} on {model.name!r}, whose newest is {model.operation}: expected {expected}",
    )
