"""Recorded calls, made again on a fresh instance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.reading.play.ports import EpisodePlayer, Grade, OfferedTool, OpenEpisode
from services.reading.play.solutions import Solution


@dataclass(frozen=True, slots=True)
class ReplayedSolution:
    """How the calls of a solution are graded, and the tools that the instance offers."""

    grade: Grade
    tools: tuple[OfferedTool, ...]


async def replay_solution(
    player: EpisodePlayer, task: Mapping[str, Any], solution: Solution
) -> ReplayedSolution:
    """Open a task's environment, make the calls of a solution, and grade its answer. Raises
    PlayError."""
    async with player.open_episode(task) as episode:
        messages = await _make_calls(episode, solution)
        grade = await episode.grade(solution.answer, messages)
        return ReplayedSolution(grade, episode.opening.tools)


async def _make_calls(episode: OpenEpisode, solution: Solution) -> list[dict[str, Any]]:
    """Make the calls; return the conversation, in OpenAI's messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.opening.task}]
    for number, call in enumerate(solution.calls):
        arguments, call_id = json.dumps(call.arguments), f"call-{number}"
        function = {"name": call.name, "arguments": arguments}
        result = await episode.call_tool(call.name, arguments)
        made = {"id": call_id, "type": "function", "function": function}
        messages += [
            {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call_id, "content": result.text},
        ]
        if result.done:
            return messages
    if solution.answer is not None:
        messages.append({"role": "assistant", "content": solution.answer})
    return messages
