"""What a further machine needs from others, in its own words."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from services.learner.ranks.machines import Call


class LearnerAwayError(Exception):
    """The learner is not there, or not any more; another one may come."""


class Membership(Protocol):
    """This machine's place among the learner's, for as long as the stream holds."""

    @property
    def over(self) -> bool:
        """Whether the learner has said that it ended in order."""
        ...

    def calls(self) -> AsyncIterator[Call]:
        """What the ranks are asked to do. Ends when it is over; raises LearnerAwayError."""
        ...

    def succeed(self, call: int, result: Mapping[str, Any]) -> None:
        """Answer a call."""
        ...

    def fail(self, call: int, error: str, *, ended: bool) -> None:
        """Answer a call that failed; `ended` where its rank is gone."""
        ...

    def leave(self) -> None:
        """Say that this machine will be taken away."""
        ...


class Learner(Protocol):
    """The learner as its further machines see it."""

    def joined(self) -> AbstractAsyncContextManager[Membership]:
        """Be a member while the block runs. Waits for the learner as long as it takes.

        Raises LearnerAwayError, and WrongMachineError when it refuses this machine.
        """
        ...
