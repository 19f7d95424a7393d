"""Attempts at tasks by a model behind an endpoint, at a temporary gateway."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from services.common.aio.concurrency import running_tasks
from services.common.domain.task_text import write_task
from services.common.rpc import rpc
from services.common.rpc.deadlines import loop_time
from services.launcher.cli.adapters.chat_endpoint import ChatEndpoint, EndpointError, WrittenCall
from services.launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
    grade_episode,
    is_slow,
    keep_renewed,
    make_open_request,
    no_grade_name,
    open_episode,
    outcome_name,
    read_part,
    rpc_error_text,
    tool_schema,
)
from services.launcher.doctor.dataset import env_key_of

# Attempts wait for each other at a limit of the gateway.
_OPEN_S = 1800.0
_CALL_S = 120.0
# The gateway enforces a call's deadline; the connection gets a little more.
_SLACK_S = 2.0
_GRADE_S = 300.0
_CLOSE_S = 30.0
_LOST = (
    pb.TOOL_OUTCOME_SESSION_LOST,
    pb.TOOL_OUTCOME_OUTCOME_UNKNOWN,
    pb.TOOL_OUTCOME_REPLAY_MISS,
)
_DONE = "<done>"


class _LostError(Exception):
    """Raised when the state of the environment is unknown or unreachable."""


@dataclass(slots=True)
class ModelAttempt:
    """An attempt, with its conversation in OpenAI's messages, and at its end a `reward` or a reason
    why there is `no_grade`. `stopped` names a limit that ended it."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reward: float | None = None
    no_grade: str = ""
    stopped: str = ""
    calls: int = 0
    seconds: float = 0.0


async def play_attempt(
    stub: Any,
    section: Mapping[str, Any],
    task: Mapping[str, Any],
    endpoint: ChatEndpoint,
    most_turns: int,
) -> ModelAttempt:
    """Play one attempt to its end; a failure of the environment or the endpoint becomes its
    `no_grade`. `section` is the gateway's."""
    attempt, began = ModelAttempt(), loop_time()
    request = make_open_request(task, "env-try")
    try:
        slow = is_slow(section, env_key_of(task))
        episode = await open_episode(stub, request, limit_s=_OPEN_S, slow=slow)
        try:
            async with running_tasks(keep_renewed(stub, request.worker_id, episode)):
                answer = await _play_turns(stub, episode, endpoint, most_turns, attempt)
                header = pb.GradeHeader(episode_id=episode.episode_id, final_answer=answer)
                written = [_transcribe(message) for message in attempt.messages]
                grade = await grade_episode(stub, header, written, _GRADE_S, episode.ready)
        finally:
            closing = pb.CloseEpisodeRequest(episode_id=episode.episode_id)
            with suppress(grpc.aio.AioRpcError):
                await stub.CloseEpisode(closing, timeout=_CLOSE_S)
        if grade.HasField("reward"):
            attempt.reward = grade.reward
        else:
            attempt.no_grade = f"{no_grade_name(grade)}: {grade.no_grade.detail}"
    except NotOpenedError as error:
        attempt.no_grade = f"the environment cannot be opened: {error}"
    except EndpointError as error:
        attempt.no_grade = f"the endpoint: {error}"
    except _LostError as error:
        attempt.no_grade = str(error)
    except grpc.aio.AioRpcError as error:
        attempt.no_grade = rpc_error_text(error)
    attempt.seconds = loop_time() - began
    return attempt


async def _play_turns(
    stub: Any,
    episode: pb.OpenEpisodeResponse,
    endpoint: ChatEndpoint,
    most_turns: int,
    attempt: ModelAttempt,
) -> str | None:
    """Play the turns; return the final answer, which is the text of a turn without calls. Raises
    EndpointError, _LostError and AioRpcError."""
    ready, messages = episode.ready, attempt.messages
    shown = [await read_part(stub, episode.episode_id, p) for p in ready.initial_observation]
    facts = ready.facts
    task = write_task(facts.prompt, facts.current_date, facts.variables, shown)
    messages.append({"role": "user", "content": task})
    tools = [_offer_tool(tool) for tool in ready.tools]
    for _ in range(most_turns):
        turn = await endpoint.answer_messages(messages, tools)
        messages.append(turn.message)
        if not turn.calls:
            if turn.cut:
                attempt.stopped = "a turn was cut at the endpoint's limit of tokens"
                return None
            return turn.text.replace(_DONE, "").strip()
        for call in turn.calls:
            answer = await _make_call(stub, episode.episode_id, call, attempt)
            if answer.done:
                return None
    attempt.stopped = f"{most_turns} turns were not enough"
    return None


async def _make_call(
    stub: Any, episode_id: str, call: WrittenCall, attempt: ModelAttempt
) -> pb.CallToolResponse:
    """Make a call and add its result to the conversation. An unknown tool or arguments that are no
    JSON object are the gateway's to refuse, and the model reads why."""
    request = pb.CallToolRequest(
        episode_id=episode_id,
        call_seq=attempt.calls,
        name=call.name,
        arguments_json=call.arguments,
        deadline=rpc.to_duration(_CALL_S),
    )
    attempt.calls += 1
    answer: pb.CallToolResponse = await stub.CallTool(request, timeout=_CALL_S + _SLACK_S)
    text = "\n".join([await read_part(stub, episode_id, part) for part in answer.parts])
    if answer.outcome in _LOST:
        raise _LostError(f"{call.name}: {outcome_name(answer)}: {text}")
    if answer.outcome != pb.TOOL_OUTCOME_OK:
        text = json.dumps({"error": text or outcome_name(answer)})
    attempt.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
    return answer


def _offer_tool(tool: pb.Tool) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}} | tool_schema(tool)
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _transcribe(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message as verifiers read it: calls are text, as in a play by hand."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    written = [f"{c['function']['name']} {c['function'].get('arguments')}" for c in calls]
    content = "\n".join(filter(None, [message.get("content"), *written]))
    return {"role": message["role"], "content": content}
