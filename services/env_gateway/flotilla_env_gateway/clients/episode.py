"""One episode at the gateway, in the thread of its connection."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.transcripts import encode_transcript
from flotilla_common.rpc import rpc
from flotilla_common.rpc.deadlines import loop_time
from flotilla_env_gateway.clients.connection import GatewayConnection, GatewayError
from flotilla_env_gateway.ports import Media, Part, Text, Tool

# The gateway enforces a call's own deadline; the connection gets a little more.
_SLACK_S = 1.0
_FETCH_TIMEOUT_S = 30.0
_TRANSCRIPT_CHUNK = 512 * 1024
_ARGUMENTS_BYTES = 2**20
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer to a tool call. `failure` is the reason if the tool gave no result; with
    `is_error` the tool reported an error."""

    parts: Sequence[Part] = ()
    is_error: bool = False
    failure: str | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeGrade:
    """The grade of an episode. Without a reward, `no_grade` is the reason why it is unknown."""

    reward: float | None
    partial_reward: float | None
    no_grade: str
    stdout: str
    # Further numbers that the verifier returned, by name; a missing one is unknown.
    named_rewards: Mapping[str, float]


class EpisodeClient:
    """One open episode. Calls are sequential."""

    def __init__(
        self, connection: GatewayConnection, episode_id: str, ready: pb.EpisodeReady
    ) -> None:
        self._connection = connection
        self._next_call = 0
        self.episode_id = episode_id
        self.tools = [
            Tool(tool.name, tool.description, tool.input_schema_json) for tool in ready.tools
        ]
        self._initial = list(ready.initial_observation)
        self._transcript_bytes = ready.transcript_bytes

    async def get_first_observation(self) -> list[Part]:
        """Return the environment's first observation."""
        return [await self._read_part(part) for part in self._initial]

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> ToolAnswer:
        """Call a tool. Never raises for the behaviour of a tool, an environment or the gateway."""
        try:
            request = self._build_request(name, arguments, timeout_s)
            self._next_call += 1
            response = await self._connection.stub.CallTool(request, timeout=timeout_s + _SLACK_S)
            parts = [await self._read_part(part) for part in response.parts]
        except grpc.aio.AioRpcError as error:
            return ToolAnswer(failure=rpc.describe_error(error))
        except (TypeError, ValueError, RecursionError) as error:
            return ToolAnswer(failure=f"the call cannot be sent: {error}")
        ok = response.outcome == pb.TOOL_OUTCOME_OK
        if ok or response.outcome == pb.TOOL_OUTCOME_TOOL_ERROR:
            return ToolAnswer(parts, is_error=not ok, done=response.done)
        shown_text = " ".join(part.text for part in parts if isinstance(part, Text))
        outcome = _enum_name(pb.ToolOutcome, response.outcome, "TOOL_OUTCOME_")
        return ToolAnswer(failure=shown_text or outcome, done=response.done)

    async def grade_episode(
        self, final_answer: str | None, conversation: Sequence[Any] | None, timeout_s: float
    ) -> EpisodeGrade:
        """Grade the episode. Raises GatewayError."""
        header = pb.GradeHeader(
            episode_id=self.episode_id,
            final_answer=final_answer,
            deadline=rpc.to_duration(timeout_s),
        )
        transcript = encode_transcript(conversation or (), self._transcript_bytes)
        requests = _grade_requests(header, transcript)
        try:
            response = await self._connection.stub.Grade(requests, timeout=timeout_s + _SLACK_S)
        except grpc.aio.AioRpcError as error:
            raise GatewayError(rpc.describe_error(error)) from error
        return _decode_grade(response)

    async def close(self) -> None:
        await asyncio.shield(self._connection.start_release(self.episode_id))

    def _build_request(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> pb.CallToolRequest:
        arguments_json = json.dumps(arguments)
        if len(arguments_json) > _ARGUMENTS_BYTES:
            # Larger ones would not reach the gateway, and would leave a gap in its call count.
            raise ValueError(f"its arguments exceed {_ARGUMENTS_BYTES} bytes of JSON")
        return pb.CallToolRequest(
            episode_id=self.episode_id,
            call_seq=self._next_call,
            name=name,
            arguments_json=arguments_json,
            deadline=rpc.to_duration(timeout_s),
        )

    async def _read_part(self, part: pb.ContentPart) -> Part:
        media = part.media
        if part.HasField("text"):
            return Text(part.text)
        data = media.data or await self._fetch_media(media.sha256)
        if media.mime.startswith("text/"):
            return Text(data.decode("utf-8", "replace"))
        return Media(data, media.mime, media.sha256, len(data), media.width, media.height)

    async def _fetch_media(self, sha256: bytes) -> bytes:
        request = pb.FetchMediaRequest(episode_id=self.episode_id, sha256=sha256)
        stream = self._connection.stub.FetchMedia(request, timeout=_FETCH_TIMEOUT_S)
        return b"".join([message.chunk async for message in stream])


def _enum_name(enum: Any, value: int, prefix: str) -> str:
    """Return the short name of an enum's value. A newer gateway may send an unknown one."""
    if value not in enum.values():
        return f"unknown {prefix.removesuffix('_').lower()} {value}"
    return enum.Name(value).removeprefix(prefix).lower()


def _grade_requests(header: pb.GradeHeader, transcript: bytes) -> Iterator[pb.GradeRequest]:
    header.transcript_bytes = len(transcript)
    yield pb.GradeRequest(header=header)
    for start in range(0, len(transcript), _TRANSCRIPT_CHUNK):
        yield pb.GradeRequest(transcript_chunk=transcript[start : start + _TRANSCRIPT_CHUNK])


async def open_episode(
    connection: GatewayConnection, request: pb.OpenEpisodeRequest, timeout_s: float
) -> EpisodeClient:
    """Open an episode; wait for a place while the gateway's queue is full. Raises GatewayError."""
    until = loop_time() + timeout_s
    while True:
        left_s = until - loop_time()
        try:
            return await _open_once(connection, request, max(0.001, left_s))
        except grpc.aio.AioRpcError as error:
            refused = rpc.service_error(error)
            pause_s = (refused and refused.retry_delay_s) or _PAUSE_S
            full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if not full or pause_s >= left_s:
                raise GatewayError(rpc.describe_error(error)) from error
        await asyncio.sleep(pause_s)


async def _open_once(
    connection: GatewayConnection, request: pb.OpenEpisodeRequest, timeout_s: float
) -> EpisodeClient:
    call = connection.stub.OpenEpisode(request, timeout=timeout_s)
    read = await rpc.read_last_message(
        call, lambda update: connection.start_release(update.episode_id)
    )
    last = read or pb.OpenEpisodeResponse()
    if last.state != pb.EPISODE_STATE_READY:
        raise GatewayError(last.detail or "the gateway opened no episode")
    connection.hold_lease(last.episode_id, rpc.to_seconds(last.ready.lease_ttl))
    return EpisodeClient(connection, last.episode_id, last.ready)


def _decode_grade(response: pb.GradeResponse) -> EpisodeGrade:
    kind = response.WhichOneof("grade")
    known, reason = kind == "reward", kind
    if kind == "no_grade":
        reason = _enum_name(pb.NoGradeReason, response.no_grade.reason, "NO_GRADE_REASON_")
    return EpisodeGrade(
        reward=response.reward if known else None,
        partial_reward=response.partial_reward if response.HasField("partial_reward") else None,
        no_grade="" if known else f"{reason}: {response.no_grade.detail}",
        stdout=response.stdout,
        named_rewards=dict(response.named_rewards),
    )
