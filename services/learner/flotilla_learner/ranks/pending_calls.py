"""Pending calls to a rank on any machine."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from flotilla_learner.ports import RankError
from flotilla_learner.ranks import protocol

Answer = asyncio.Future[protocol.Message]


class RankHandle(Protocol):
    """One training rank, here or on another machine."""

    @property
    def has_ended(self) -> bool:
        """True if its process is gone."""
        ...

    def send_command(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        """Send a command at once; the answer, or RankError, comes later."""
        ...

    def kill(self) -> None:
        """Kill it at once; `close` must still be called."""
        ...

    async def close(self) -> None:
        """End it cleanly, or by force if it does not respond."""
        ...


class PendingCalls:
    """Calls that await an answer, by number."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[str, Answer]] = {}

    def begin_call(self, command: str) -> tuple[int, Answer]:
        """Return a new call's number and its future answer."""
        call, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[call] = (command, answer)
        return call, answer

    def command_of(self, call: int) -> str:
        return self._waiting[call][0]

    def complete_call(self, call: int, result: protocol.Message) -> None:
        """Complete a call; an answer to a cancelled call is dropped."""
        _, answer = self._waiting.pop(call)
        if not answer.done():
            answer.set_result(result)

    def fail_call(self, call: int, problem: str) -> None:
        _, answer = self._waiting.pop(call)
        if not answer.done():
            answer.set_exception(RankError(problem))

    def fail_all(self, problem: str) -> None:
        """Fail every open call: no answers will come any more."""
        for call in list(self._waiting):
            self.fail_call(call, problem)


def failed_answer(problem: str) -> Answer:
    """Return the answer of a rank that is gone."""
    answer: Answer = asyncio.get_running_loop().create_future()
    answer.set_exception(RankError(problem))
    return answer
