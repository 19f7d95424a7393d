"""The service as the room sees it: it holds a model, and carries out orders by their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from flotilla_learner.training_types import AdamUpdate, TargetBatch, TargetScores


class ServiceGoneError(Exception):
    """The session, the model or what it saved is no more; the message says which."""


class ServiceRefusedError(Exception):
    """The service refuses for good, or was away for too long; the message gives the fix."""


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model at the service, by which a later process finds it again."""

    session_id: str
    model_id: str
    # Number of the first order after its making.
    first_order: int = 1


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save the weights for samplers, or weights and optimizer; a name is used once by a model."""

    name: str
    kind: Literal["sampler", "state"]


# A batch whose gradient is accumulated, or that is only scored; an update; a save.
Order = TargetBatch | AdamUpdate | SaveOrder
# Their answers: scores; metrics; the address of what was saved.
Answer = TargetScores | Mapping[str, float] | str


class HostedService(Protocol):
    """One session with the service, and one model in it.

    Every method waits while the service is away or refuses for now. Raises ServiceGoneError and
    ServiceRefusedError."""

    async def create_model(self) -> HostedModel:
        """Create an untrained model in a session of its own."""
        ...

    async def load_model(self, address: str) -> HostedModel:
        """Create a model from saved weights and optimizer, in a session of its own."""
        ...

    async def attach_model(self, model: HostedModel) -> None:
        """Go on with the model of an earlier process."""
        ...

    async def carry_out(
        self, orders: Sequence[Order], first: int, purpose: str
    ) -> tuple[list[Answer], int]:
        """Have the model carry out orders, numbered from `first` on; return their answers and the
        next number. An order may take several numbers.

        Orders that were carried out under the same numbers are not carried out again: they get
        their first answers."""
        ...

    async def delete(self, address: str) -> bool:
        """Delete what was saved; return False if that must be tried again. Never raises."""
        ...

    async def close(self, *, finish: bool) -> None:
        """Let go of the session; with `finish` the service forgets its model, too."""
        ...
