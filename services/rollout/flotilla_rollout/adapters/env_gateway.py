"""Episodes at the env_gateway."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as pb_grpc
from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.rpc.rpc import (
    describe_error,
    read_last_message,
    refusal_reason,
    to_duration,
    to_seconds,
)
from flotilla_common.telemetry.log import get_logger
from flotilla_common.wire.enums import NO_GRADE_REASONS
from flotilla_rollout.adapters.gateway_content import ContentPartReader
from flotilla_rollout.adapters.retried_calls import call_with_retries
from flotilla_rollout.api.codec import episode_from_pb, grade_from_pb, tool_result_from_pb
from flotilla_rollout.ports import EnvironmentLost
from flotilla_rollout.types import EpisodeInfo, OpenRequest, ToolResult

if TYPE_CHECKING:
    from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceAsyncStub

CLOSE_TIMEOUT_S = 5.0
RENEW_TIMEOUT_S = 5.0
# The gateway enforces a call's own deadline; the connection gets a little more.
SLACK_S = 1.0
TRANSCRIPT_CHUNK = 512 * 1024

log = get_logger(__name__)


class GatewayEpisode:
    """One open episode. Calls get their places in the order in which they begin."""

    def __init__(
        self, stub: "EpisodeServiceAsyncStub", parts: ContentPartReader, info: EpisodeInfo
    ) -> None:
        self._stub = stub
        self._parts = parts
        self._next_call = 0
        self.info = info
        # Set by renewal when the gateway no longer knows the episode.
        self.lost = False

    async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> ToolResult:
        if self.lost:
            raise EnvironmentLost("the gateway has given up the episode")
        call_seq = self._next_call
        self._next_call += 1

        async def send_call(remaining_s: float) -> pb.CallToolResponse:
            request = pb.CallToolRequest(
                episode_id=self.info.episode_id,
                call_seq=call_seq,
                name=name,
                arguments_json=arguments_json,
                deadline=to_duration(remaining_s),
            )
            return await self._stub.CallTool(request, timeout=remaining_s + SLACK_S)

        try:
            response = await call_with_retries(send_call, timeout_s)
            parts = await self._parts.read_parts(self.info.episode_id, response.parts)
        except grpc.aio.AioRpcError as error:
            raise EnvironmentLost(describe_error(error)) from error
        return tool_result_from_pb(response, parts)

    async def request_grade(
        self, final_answer: str | None, transcript: bytes, timeout_s: float
    ) -> Grade:
        async def send_grade(remaining_s: float) -> pb.GradeResponse:
            header = pb.GradeHeader(
                episode_id=self.info.episode_id,
                final_answer=final_answer,
                deadline=to_duration(remaining_s),
            )
            parts = _grade_requests(header, transcript)
            return await self._stub.Grade(parts, timeout=remaining_s + SLACK_S)

        try:
            return grade_from_pb(await call_with_retries(send_grade, timeout_s))
        except grpc.aio.AioRpcError as error:
            if refusal_reason(error) == grpc.StatusCode.DEADLINE_EXCEEDED.name:
                return Grade(reason=NoGradeReason.TIMEOUT, detail=describe_error(error))
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return Grade(reason=NoGradeReason.EXECUTION_FAILED, detail=describe_error(error))
            raise EnvironmentLost(describe_error(error)) from error


def _grade_requests(header: pb.GradeHeader, transcript: bytes) -> Iterator[pb.GradeRequest]:
    header.transcript_bytes = len(transcript)
    yield pb.GradeRequest(header=header)
    for start in range(0, len(transcript), TRANSCRIPT_CHUNK):
        yield pb.GradeRequest(transcript_chunk=transcript[start : start + TRANSCRIPT_CHUNK])


class GatewayEnvironment:
    """Episodes of one worker: it opens, renews and closes them. A `family` is shown pictures."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        worker_id: str,
        renew_interval_s: float,
        family: VisionFamily | None = None,
    ) -> None:
        self._stub = cast("EpisodeServiceAsyncStub", pb_grpc.EpisodeServiceStub(channel))
        self._parts = ContentPartReader(self._stub, family)
        self._run_id = run_id
        self._worker_id = worker_id
        self._interval_s = renew_interval_s
        self._open: dict[str, GatewayEpisode] = {}
        # Pending closes, which continue even if their callers have been cancelled.
        self._closing = BackgroundTasks()

    @asynccontextmanager
    async def open_episode(self, request: OpenRequest) -> AsyncGenerator[GatewayEpisode]:
        """Open an episode, closed on every exit. Raises EnvironmentLost."""
        message = self._make_open_request(request)
        try:
            episode = await call_with_retries(
                lambda left: self._wait_until_ready(message, left), request.budget_s
            )
        except grpc.aio.AioRpcError as error:
            raise EnvironmentLost(describe_error(error)) from error
        self._open[episode.info.episode_id] = episode
        try:
            yield episode
        finally:
            del self._open[episode.info.episode_id]
            await asyncio.shield(self._start_closing(episode.info.episode_id))

    async def keep_renewing(self) -> None:
        """Renew all open episodes periodically, in one call."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._open:
                await self._renew_episodes()

    async def wait_until_closed(self) -> None:
        """Wait for pending closes, whose callers may have been cancelled, and end the processes
        that read pictures."""
        while self._closing.running:
            await asyncio.wait(self._closing.running)
        await self._parts.close()

    def _make_open_request(self, request: OpenRequest) -> pb.OpenEpisodeRequest:
        key = request.key
        # `try` is a Python keyword, so the field cannot be a keyword argument.
        fields = {
            "request_id": uuid.uuid4().hex,
            "run_id": self._run_id,
            "group_id": key.group_id,
            "attempt_index": key.attempt_index,
            "try": key.attempt_try,
            "opening": request.opening,
            "task_json": request.task_json,
            "worker_id": self._worker_id,
            "budget": to_duration(request.budget_s),
        }
        return pb.OpenEpisodeRequest(**fields)  # pyright: ignore[reportArgumentType]

    async def _wait_until_ready(
        self, message: pb.OpenEpisodeRequest, left_s: float
    ) -> GatewayEpisode:
        """Read the states to their end: leaving early would cancel, and the gateway would close."""
        call = self._stub.OpenEpisode(message, timeout=left_s)
        read = await read_last_message(call, lambda update: self._start_closing(update.episode_id))
        last = read or pb.OpenEpisodeResponse()
        if last.state != pb.EPISODE_STATE_READY:
            reason = NO_GRADE_REASONS.find_member(last.no_grade)
            raise EnvironmentLost(last.detail or "the gateway opened no episode", reason)
        return await self._make_episode(last)

    async def _make_episode(self, update: pb.OpenEpisodeResponse) -> GatewayEpisode:
        ttl_s = to_seconds(update.ready.lease_ttl)
        if ttl_s > 0:
            self._interval_s = min(self._interval_s, ttl_s / 3)
        try:
            shown = await self._parts.read_parts(
                update.episode_id, update.ready.initial_observation
            )
            info = episode_from_pb(update.episode_id, update.ready, shown)
        except grpc.aio.AioRpcError:
            await self._close_episode(update.episode_id)
            raise
        except (ValueError, TypeError) as error:
            await self._close_episode(update.episode_id)
            raise EnvironmentLost(f"the environment's tools cannot be read: {error}") from error
        return GatewayEpisode(self._stub, self._parts, info)

    async def _renew_episodes(self) -> None:
        request = pb.RenewEpisodesRequest(worker_id=self._worker_id, episode_ids=list(self._open))
        try:
            answer = await self._stub.RenewEpisodes(request, timeout=RENEW_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # The next round retries; use will show episodes that expire meanwhile.
            log.warning("episodes not renewed", reason=describe_error(error))
            return
        for episode_id in answer.lost_episode_ids:
            if episode_id in self._open:
                self._open[episode_id].lost = True

    def _start_closing(self, episode_id: str) -> asyncio.Task[None]:
        return self._closing.start_task(self._close_episode(episode_id))

    async def _close_episode(self, episode_id: str) -> None:
        """Close an episode. Best effort: if the close is lost, the episode ends with its lease."""
        request = pb.CloseEpisodeRequest(episode_id=episode_id)
        try:
            await self._stub.CloseEpisode(request, timeout=CLOSE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("episode not closed", episode=episode_id, reason=describe_error(error))
