"""Attempts at tasks by a model behind an endpoint, at a temporary gateway."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flotilla_common.rpc.deadlines import loop_time
from flotilla_launcher.cli.adapters.chat_endpoint import EndpointError, ModelTurn, WrittenCall
from flotilla_reading.play.ports import (
    CallResult,
    EpisodePlayer,
    OfferedTool,
    OpenEpisode,
    PlayError,
)

# What a `no_grade` begins with that is the model's.
ENDPOINT_FAILED = "the endpoint: "
DONE = "<done>"


class Model(Protocol):
    """A model that answers conversations with tools."""

    async def answer_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> ModelTurn:
        """Return the model's next turn. Raises EndpointError."""
        ...


@dataclass(slots=True)
class ModelAttempt:
    """An attempt, with its conversation in OpenAI's messages, and at its end a `reward` or a reason
    why there is `no_grade`. `stopped` names a limit that ended it; `tool_errors` are calls without
    the outcome ok."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reward: float | None = None
    no_grade: str = ""
    stopped: str = ""
    turns: int = 0
    calls: int = 0
    tool_errors: int = 0
    seconds: float = 0.0


async def play_attempt(
    player: EpisodePlayer, task: Mapping[str, Any], model: Model, most_turns: int
) -> ModelAttempt:
    """Play one attempt to its end; a failure of the environment or the endpoint becomes its
    `no_grade`."""
    attempt, began = ModelAttempt(), loop_time()
    try:
        async with player.open_episode(task) as episode:
            answer = await _play_turns(episode, model, most_turns, attempt)
            grade = await episode.grade(answer, attempt.messages)
        attempt.reward = grade.reward
        if grade.reward is None:
            attempt.no_grade = f"{grade.no_grade}: {grade.detail}"
    except PlayError as error:
        attempt.no_grade = str(error)
    except EndpointError as error:
        attempt.no_grade = f"{ENDPOINT_FAILED}{error}"
    attempt.seconds = loop_time() - began
    return attempt


async def _play_turns(
    episode: OpenEpisode, model: Model, most_turns: int, attempt: ModelAttempt
) -> str | None:
    """Play the turns; return the final answer, which is the text of a turn without calls. Raises
    EndpointError and PlayError."""
    messages = attempt.messages
    messages.append({"role": "user", "content": episode.opening.task})
    tools = [offer_tool(tool) for tool in episode.opening.tools]
    for _ in range(most_turns):
        turn = await model.answer_messages(messages, tools)
        messages.append(turn.message)
        attempt.turns += 1
        if not turn.calls:
            if turn.cut:
                attempt.stopped = "a turn was cut at the endpoint's limit of tokens"
                return None
            return turn.text.replace(DONE, "").strip()
        for call in turn.calls:
            if await make_call(episode, call, attempt):
                return None
    attempt.stopped = f"{most_turns} turns were not enough"
    return None


async def make_call(episode: OpenEpisode, call: WrittenCall, attempt: ModelAttempt) -> bool:
    """Make a call, add its result to the conversation, and return whether it ended the episode. An
    unknown tool or arguments that are no JSON object are the gateway's to refuse, and the model
    reads why."""
    attempt.calls += 1
    result = await episode.call_tool(call.name, call.arguments)
    attempt.tool_errors += result.outcome != "ok"
    answer = {"tool_call_id": call.call_id, "content": tell_result(result)}
    attempt.messages.append({"role": "tool", **answer})
    return result.done


def tell_result(result: CallResult) -> str:
    """Return the answer to a call as a policy reads it."""
    if result.outcome == "ok":
        return result.text
    return json.dumps({"error": result.text or result.outcome})


def offer_tool(tool: OfferedTool) -> dict[str, Any]:
    """Return a tool as OpenAI's API has it."""
    schema = {"type": "object", "properties": {}} | dict(tool.schema)
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}
