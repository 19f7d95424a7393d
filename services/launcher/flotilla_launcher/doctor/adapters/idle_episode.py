"""An episode in which the policy does nothing but look, at a temporary gateway."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.task_text import write_task
from flotilla_common.rpc import rpc
from flotilla_common.tasks.task_format import SINGLE_TURN
from flotilla_launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
    backend_key,
    grade_episode,
    is_slow,
    make_open_request,
    open_episode,
    outcome_name,
    read_media,
    rpc_error_text,
    suggest_backend_fix,
    tool_schema,
)
from flotilla_launcher.doctor.canaries import Canary
from flotilla_launcher.doctor.findings import FindingError, fail, last_line, warn
from flotilla_launcher.doctor.idle_comparison import IdleView

_CALL_S = 30.0
# Added to the time that one run of a verifier may take.
_GRADE_MARGIN_S = 5.0
_MOST_READS = 4
_READ_S = 10.0


@dataclass(frozen=True, slots=True)
class IdleEpisode:
    """An episode that was opened, read, graded and closed. `ready` has the bytes of all that it
    shows; `read_results` are by tool."""

    episode_id: str
    ready: pb.EpisodeReady
    read_results: Mapping[str, str]
    grade: pb.GradeResponse

    def view(self) -> IdleView:
        ready = self.ready
        tools = {t.name: f"{t.description}\n{t.input_schema_json}" for t in ready.tools}
        return IdleView(
            tools,
            _text_of(ready.initial_observation),
            self.read_results,
            self.grade.reward,
            (self.episode_id, ready.instance_id),
        )


async def play_idle_episode(stub: Any, section: Mapping[str, Any], canary: Canary) -> IdleEpisode:
    """Open an episode, call the tools that only read, grade and close it. Raises FindingError."""
    env_key = canary.env_key
    slow, limit_s = is_slow(section, env_key), float(section["open_timeout_s"])
    request = make_open_request(canary.task, "doctor")
    try:
        last = await open_episode(stub, request, limit_s=limit_s, slow=slow)
    except NotOpenedError as error:
        reason = short_reason(str(error))
        what = f"{env_key} cannot be opened: {reason}"
        where = backend_key(section, canary.backend, reason)
        raise FindingError(fail, what, suggest_backend_fix(reason, where)) from error
    try:
        _check_tools(canary, last.ready)
        for part in last.ready.initial_observation:
            if part.media.mime.startswith(("image/", "text/")):
                part.media.data = await read_media(stub, last.episode_id, part.media)
        read = await _read_everything(stub, canary, last)
        grade_s = float(section["verifiers"]["timeout_s"]) + _GRADE_MARGIN_S
        return IdleEpisode(last.episode_id, last.ready, read, await _grade(stub, last, grade_s))
    except grpc.aio.AioRpcError as error:
        reason = short_reason(rpc_error_text(error))
        what = f"{env_key} cannot be graded: {reason}"
        where = backend_key(section, canary.backend, reason)
        raise FindingError(fail, what, suggest_backend_fix(reason, where)) from error
    finally:
        closing = pb.CloseEpisodeRequest(episode_id=last.episode_id)
        await stub.CloseEpisode(closing, timeout=_CALL_S)


def short_reason(text: str) -> str:
    """Return the last line that is not blank: a gateway's log ends with the cause of its end."""
    return last_line(text, 800)


def _check_tools(canary: Canary, ready: pb.EpisodeReady) -> None:
    if not ready.tools and canary.task.get("task_modality") != SINGLE_TURN:
        fix = "check that the environment's MCP server is up, or correct task_modality"
        raise FindingError(fail, f"{canary.env_key} offers no tool", fix)


async def _read_everything(
    stub: Any, canary: Canary, last: pb.OpenEpisodeResponse
) -> dict[str, str]:
    """Call some tools that only read and need no argument, each twice. Return the results that are
    the same both times: others depend on more than the state, as on a clock. Raises FindingError
    if there is no result."""
    readers = [tool for tool in last.ready.tools if tool.read_only]
    chosen = [tool.name for tool in readers if not tool_schema(tool).get("required")]
    results: dict[str, str] = {}
    for number, name in enumerate(chosen[:_MOST_READS]):
        twice: list[str] = []
        for call_seq in (2 * number, 2 * number + 1):
            request = pb.CallToolRequest(
                episode_id=last.episode_id,
                call_seq=call_seq,
                name=name,
                arguments_json="{}",
                deadline=rpc.to_duration(_READ_S),
            )
            answer: pb.CallToolResponse = await stub.CallTool(request, timeout=_CALL_S)
            text = _text_of(answer.parts)
            if answer.outcome not in (pb.TOOL_OUTCOME_OK, pb.TOOL_OUTCOME_TOOL_ERROR):
                reason = short_reason(text) or outcome_name(answer)
                what = f"{canary.env_key}: {name} gives no result: {reason}"
                raise FindingError(warn, what, "`flotilla env try` repeats it by hand")
            twice.append(text)
            if answer.done:
                return results
        if twice[0] == twice[1]:
            results[name] = twice[0]
    return results


async def _grade(stub: Any, last: pb.OpenEpisodeResponse, limit_s: float) -> pb.GradeResponse:
    header = pb.GradeHeader(
        episode_id=last.episode_id, final_answer="", deadline=rpc.to_duration(limit_s)
    )
    facts = last.ready.facts
    task = write_task(facts.prompt, facts.current_date, facts.variables)
    messages = [
        {"role": "user", "content": task},
        {"role": "assistant", "content": ""},
    ]
    return await grade_episode(stub, header, messages, limit_s + _GRADE_MARGIN_S, last.ready)


def _text_of(parts: Any) -> str:
    """Join the text of content parts: the pixels of a picture may show a clock."""
    return "\n".join(part.text for part in parts if part.HasField("text"))
