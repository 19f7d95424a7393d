"""Interfaces that a further machine of the learner needs from others."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from services.learner.ranks.machines import RankCall


class LearnerAwayError(Exception):
    """The learner is not there, or not any more; another one may come."""


class Membership(Protocol):
    """This machine's place among the learner's, for as long as the stream holds."""

    @property
    def over(self) -> bool:
        """True once the learner has said that it ended in order."""
        ...

    def receive_calls(self) -> AsyncIterator[RankCall]:
        """Yield the calls to the ranks. Ends when the run is over; raises LearnerAwayError."""
        ...

    def send_result(self, call: int, result: Mapping[str, Any]) -> None:
        """Answer a call."""
        ...

    def send_error(self, call: int, error: str, *, ended: bool) -> None:
        """Answer a call that failed; `ended` where its rank is gone."""
        ...

    def announce_leaving(self) -> None:
        """Say that this machine will be taken away."""
        ...


class LearnerClient(Protocol):
    """The learner as its further machines see it."""

    def join_learner(self) -> AbstractAsyncContextManager[Membership]:
        """Be a member while the block runs. Waits for the learner as long as it takes.

        Raises LearnerAwayError, and WrongMachineError when it refuses this machine."""
        ...
