"""The engine of many samplers, in this room's own terms."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from flotilla_rollout.sampling.types import (
    EngineAnswer,
    PromptReport,
    RequestWeights,
    SamplingOrder,
)


class UnfitWeights(Exception):
    """A folder holds no weights, or none that the engine can serve."""


# Called once the engine has new weights, in a new state, and before it computes with them: a
# request that named their prefix cache earlier would fill it by the old weights.
Adopt = Callable[[], None]


class SamplingEngine(Protocol):
    """Engine that holds a base, adapters beside it, or another whole model instead.

    Every method raises EngineDead if the process must be replaced. Weights are changed by one call
    at a time, which must not be cancelled."""

    @property
    def state(self) -> int:
        """Number of the present state of weights: each replacement counts one on."""
        ...

    async def add_adapter(self, number: int, folder: Path) -> None:
        """Load an adapter under a new number from 1. Raises UnfitWeights."""
        ...

    async def replace_adapter(self, number: int, folder: Path, adopt: Adopt) -> None:
        """Replace an adapter; running requests continue with the new one. Raises UnfitWeights, and
        nothing has changed."""
        ...

    async def remove_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        ...

    async def load_model(self, folder: Path, adopt: Adopt) -> None:
        """Replace the whole model; running requests continue with the new one."""
        ...

    def take_slot(self) -> AbstractAsyncContextManager[None]:
        """Wait until a request can begin, and count it as running in the block."""
        ...

    async def sample_answer(
        self, order: SamplingOrder, index: int, weights: RequestWeights
    ) -> EngineAnswer:
        """Sample the `index`th answer. A cancelled call ends its request. Raises EngineError."""
        ...

    async def score_prompt(
        self, order: SamplingOrder, weights: RequestWeights
    ) -> tuple[PromptReport, int]:
        """Return the report about the prompt, and the state of the weights then. Raises
        EngineError."""
        ...
