"""A state of a task's world, graded as often as needed."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from flotilla_reading.play.ports import EpisodePlayer, Grade, OpenEpisode, Opening
from flotilla_reading.play.solutions import SolutionCall

# A call, or several of which the first that the environment accepts is made.
Move = SolutionCall | tuple[SolutionCall, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A call that was made, and what came back."""

    call: SolutionCall
    outcome: str
    text: str


class World:
    """The state after some moves. It is graded in one episode if that can be graded again, else
    in an episode of its own for each grade."""

    def __init__(
        self, player: EpisodePlayer, fields: Mapping[str, Any], moves: Sequence[Move]
    ) -> None:
        self._player = player
        self._fields = fields
        self._moves = moves
        self._stack = AsyncExitStack()
        self._episode: OpenEpisode | None = None
        self._graded = False
        self.steps: Sequence[Step] = ()

    async def open(self) -> Opening:
        """Reach the state, unless it is. Raises PlayError."""
        if self._episode is not None:
            return self._episode.opening
        opening = self._player.open_episode(self._fields)
        self._episode = episode = await self._stack.enter_async_context(opening)
        self._graded, self.steps = False, await _make_moves(episode, self._moves)
        return episode.opening

    async def grade(self, answer: str | None) -> Grade:
        """Grade the state with a final answer. Raises PlayError."""
        if self._episode is not None and self._graded and not self._episode.opening.regrades:
            await self.close()
        opening = await self.open()
        assert self._episode is not None
        messages = _tell(opening, self.steps, answer)
        grade = await self._episode.grade(answer, messages, again=self._graded)
        self._graded = True
        return grade

    async def close(self) -> None:
        self._episode = None
        await self._stack.aclose()


@asynccontextmanager
async def open_world(
    player: EpisodePlayer, fields: Mapping[str, Any], moves: Sequence[Move] = ()
) -> AsyncGenerator[World]:
    """Yield the state of a task after these moves; its episode is closed at the end."""
    world = World(player, fields, moves)
    try:
        yield world
    finally:
        await world.close()


async def _make_moves(episode: OpenEpisode, moves: Sequence[Move]) -> list[Step]:
    steps: list[Step] = []
    for move in moves:
        for call in move if isinstance(move, tuple) else (move,):
            arguments = msgspec.json.encode(call.arguments).decode()
            result = await episode.call_tool(call.name, arguments)
            steps.append(Step(call, result.outcome, result.text))
            if result.done:
                return steps
            if result.outcome == "ok":
                break
    return steps


def _tell(opening: Opening, steps: Sequence[Step], answer: str | None) -> list[dict[str, Any]]:
    """Return the conversation, in OpenAI's messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": opening.task}]
    for number, step in enumerate(steps):
        arguments = msgspec.json.encode(step.call.arguments).decode()
        function = {"name": step.call.name, "arguments": arguments}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call-{number}", "content": step.text})
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return messages
