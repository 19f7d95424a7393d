"""Calls to a rank that are under way, wherever the rank is."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from services.learner.ports import RankError
from services.learner.ranks import protocol

Answer = asyncio.Future[protocol.Message]


class RankHandle(Protocol):
    """One training rank, here or on another machine."""

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        ...

    def send(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        """Sends a command at once; the answer comes later, or RankError in its place."""
        ...

    def kill(self) -> None:
        """Ends it at once; `close` still has to be called."""
        ...

    async def close(self) -> None:
        """Ends it in order, or by force when it does not listen."""
        ...


class Calls:
    """Answers that are waited for, by the number of their call."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[str, Answer]] = {}

    def begin(self, command: str) -> tuple[int, Answer]:
        """A new call's number, and its answer-to-be."""
        call, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[call] = (command, answer)
        return call, answer

    def command(self, call: int) -> str:
        """What was asked for."""
        return self._waiting[call][0]

    def succeed(self, call: int, result: protocol.Message) -> None:
        """Nobody waits any more for a call that was cancelled."""
        _, answer = self._waiting.pop(call)
        if not answer.done():
            answer.set_result(result)

    def fail(self, call: int, problem: str) -> None:
        """The call ends with a RankError."""
        _, answer = self._waiting.pop(call)
        if not answer.done():
            answer.set_exception(RankError(problem))

    def fail_all(self, problem: str) -> None:
        """Nothing will be answered any more."""
        for call in list(self._waiting):
            self.fail(call, problem)


def failed(problem: str) -> Answer:
    """The answer of a rank that is gone."""
    answer: Answer = asyncio.get_running_loop().create_future()
    answer.set_exception(RankError(problem))
    return answer
