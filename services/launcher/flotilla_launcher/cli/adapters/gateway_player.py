"""Episodes at a temporary gateway, for the readers that play some."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.domain.task_text import write_task
from flotilla_common.rpc import rpc
from flotilla_launcher.doctor.adapters.trial_episode import (
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
from flotilla_launcher.doctor.dataset import env_key_of
from flotilla_reading.play.ports import CallResult, Grade, OfferedTool, Opening, PlayError

# Episodes wait for each other at a limit of the gateway.
_OPEN_S = 1800.0
_CALL_S = 120.0
# The gateway enforces a call's deadline; the connection gets a little more.
_SLACK_S = 2.0
_GRADE_S = 300.0
_CLOSE_S = 30.0
# A person takes long; the gateway takes the most that it allows.
PERSON_S = 86_400
# Of a call, and of a final answer: more fits into no message (rpc_options.py).
_MOST_BYTES = 2**20
_LOST = (
    pb.TOOL_OUTCOME_SESSION_LOST,
    pb.TOOL_OUTCOME_OUTCOME_UNKNOWN,
    pb.TOOL_OUTCOME_REPLAY_MISS,
)


class GatewayEpisode:
    """An `OpenEpisode` of a gateway."""

    def __init__(self, stub: Any, episode: pb.OpenEpisodeResponse, opening: Opening) -> None:
        self.opening = opening
        self._stub = stub
        self._episode = episode
        self._calls = 0

    async def call_tool(self, name: str, arguments: str) -> CallResult:
        """Raises PlayError if the state of the environment is unknown after it."""
        if (size := len(name.encode()) + len(arguments.encode())) > _MOST_BYTES:
            # It would not reach the gateway, and would leave a gap in its count of calls.
            text = f"the call has {size} bytes, more than {_MOST_BYTES}"
            return CallResult("bad_arguments", text, done=False)
        episode_id = self._episode.episode_id
        request = pb.CallToolRequest(
            episode_id=episode_id,
            call_seq=self._calls,
            name=name,
            arguments_json=arguments,
            deadline=rpc.to_duration(_CALL_S),
        )
        self._calls += 1
        try:
            answer = await self._stub.CallTool(request, timeout=_CALL_S + _SLACK_S)
            text = "\n".join([await read_part(self._stub, episode_id, p) for p in answer.parts])
        except grpc.aio.AioRpcError as error:
            raise _play_error(error) from error
        if answer.outcome in _LOST:
            raise PlayError(f"{name}: {outcome_name(answer)}: {text}")
        return CallResult(outcome_name(answer), text, answer.done)

    async def grade(
        self, answer: str | None, messages: Sequence[Mapping[str, Any]], *, again: bool = False
    ) -> Grade:
        """Raises PlayError if no gateway answers. Of a final answer that is too long for it, the
        verifier reads the beginning."""
        episode = self._episode
        if answer is not None:
            answer = answer.encode()[:_MOST_BYTES].decode(errors="ignore")
        header = pb.GradeHeader(episode_id=episode.episode_id, final_answer=answer, again=again)
        written = [_transcribe(message) for message in messages]
        try:
            grade = await grade_episode(self._stub, header, written, _GRADE_S, episode.ready)
        except grpc.aio.AioRpcError as error:
            raise _play_error(error) from error
        if grade.HasField("reward"):
            return Grade(grade.reward, printed=grade.stdout, failed=tuple(grade.checks_failed))
        why = grade.no_grade
        return Grade(None, no_grade_name(grade), why.detail, grade.stdout, why.verifier_fault)


class GatewayPlayer:
    """An `EpisodePlayer` at a gateway; `section` is its table of the spec, and `who` the name that
    its episodes have in the gateway's log. With a `budget_s` they may last so long, if the gateway
    allows it."""

    def __init__(
        self, stub: Any, section: Mapping[str, Any], who: str, budget_s: int | None = None
    ) -> None:
        self._stub = stub
        self._section = section
        self._who = who
        self._budget_s = budget_s

    @asynccontextmanager
    async def open_episode(self, task: Mapping[str, Any]) -> AsyncGenerator[GatewayEpisode]:
        """Raises PlayError."""
        request = make_open_request(task, self._who)
        if self._budget_s is not None:
            request.budget.FromSeconds(self._budget_s)
        slow = is_slow(self._section, env_key_of(task))
        try:
            episode = await open_episode(self._stub, request, limit_s=_OPEN_S, slow=slow)
        except NotOpenedError as error:
            message = f"the environment cannot be opened: {error}"
            raise PlayError(message, task_fault=error.task_fault) from error
        try:
            async with running_tasks(keep_renewed(self._stub, request.worker_id, episode)):
                try:
                    opening = await _read_opening(self._stub, episode)
                except grpc.aio.AioRpcError as error:
                    raise _play_error(error) from error
                yield GatewayEpisode(self._stub, episode, opening)
        finally:
            closing = pb.CloseEpisodeRequest(episode_id=episode.episode_id)
            with suppress(grpc.aio.AioRpcError):
                await self._stub.CloseEpisode(closing, timeout=_CLOSE_S)


async def _read_opening(stub: Any, episode: pb.OpenEpisodeResponse) -> Opening:
    ready = episode.ready
    shown = [await read_part(stub, episode.episode_id, p) for p in ready.initial_observation]
    facts = ready.facts
    return Opening(
        prompt=facts.prompt,
        task=write_task(facts.prompt, facts.current_date, facts.variables, shown),
        observation="\n".join(shown),
        tools=tuple(
            OfferedTool(
                *(tool.name, tool.description, tool_schema(tool)), tool.read_only, tool.idempotent
            )
            for tool in ready.tools
        ),
        regrades=ready.regrades,
    )


def _play_error(error: grpc.aio.AioRpcError) -> PlayError:
    timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return PlayError(rpc_error_text(error), timed_out=timed_out)


def _transcribe(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message as verifiers read it: calls are text, as in a play by hand."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    written = [f"{c['function']['name']} {c['function'].get('arguments')}" for c in calls]
    content = "\n".join(filter(None, [message.get("content"), *written]))
    return {"role": message["role"], "content": content}
