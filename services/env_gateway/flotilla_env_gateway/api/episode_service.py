"""The gateway's edge: `flotilla.env_gateway.v1.EpisodeService`. The proto holds the contract."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.stalled_streams import RefusedStreamDrain, StalledError, read_paced
from flotilla_common.tasks.task_format import TaskError
from flotilla_common.text.parsing import run_aside
from flotilla_common.wire.enums import NO_GRADE_REASONS
from flotilla_env_gateway.api import codec
from flotilla_env_gateway.config.gateway import LimitsConfig
from flotilla_env_gateway.episodes.episode_book import CallSeqError, EpisodeLostError, EpisodeState
from flotilla_env_gateway.episodes.episode_grading import RegradeError
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import DrainingError, Gateway, UnknownEnvironmentError
from flotilla_env_gateway.limits.episode_admission import OverLimitError, QueueFullError

_DOMAIN = "env_gateway.flotilla"
_CHUNK_BYTES = 2**20
_QUEUE_RETRY_S = 1.0
# A transcript that stalls for so long is refused.
_STALL_S = 30.0
# A watcher of a busy gateway gets at most ten updates a second, and all watchers together at most a
# thousand.
_WATCH_PERIOD_S = 0.1
_WATCH_SHARE_S = 0.001
_MOST_WATCHES = 256
# Limit of all transcripts being read.
_MOST_READ_BYTES = 256 * 2**20

_STATUS_BY_ERROR = {
    TaskError: (grpc.StatusCode.INVALID_ARGUMENT, "BAD_TASK"),
    UnknownEnvironmentError: (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_ENVIRONMENT"),
    OverLimitError: (grpc.StatusCode.FAILED_PRECONDITION, "OVER_LIMIT"),
    CallSeqError: (grpc.StatusCode.FAILED_PRECONDITION, "CALL_SEQ"),
    RegradeError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_REGRADE"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    EpisodeLostError: (grpc.StatusCode.NOT_FOUND, "EPISODE_LOST"),
    StalledError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "STREAM_STALLED"),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
}

Context = grpc.aio.ServicerContext[Any, Any]


def most_streams(limits: LimitsConfig) -> dict[str, int]:
    """Return the number of concurrent calls of each method that streams its answer. A repeated
    request to open is another call until the first has ended."""
    path = "/flotilla.env_gateway.v1.EpisodeService"
    openings = 2 * (limits.max_episodes + limits.max_waiting)
    return {f"{path}/OpenEpisode": openings, f"{path}/WatchCapacity": _MOST_WATCHES}


class EpisodeService(episode_service_pb2_grpc.EpisodeServiceServicer):
    """The gRPC service over one gateway. `request_drain` starts the shutdown of the whole
    process."""

    def __init__(self, gateway: Gateway, request_drain: Callable[[], None]) -> None:
        self._gateway = gateway
        self._request_drain = request_drain
        self._refused_streams = RefusedStreamDrain()
        self._watches = 0
        # Bytes of the transcripts in transit.
        self.reading_bytes = 0

    async def OpenEpisode(
        self, request: pb.OpenEpisodeRequest, context: Context
    ) -> AsyncIterator[pb.OpenEpisodeResponse]:
        gateway = self._gateway
        with _translating_refusals():
            spec = await run_aside(
                len(request.task_json), lambda: codec.decode_open_request(request, gateway.config)
            )
            session = gateway.open_episode(spec)
            gateway.join_opening(session)
            # Not in a `finally`: a call that is cancelled while it writes leaves this generator
            # suspended until garbage collection.
            on_end: Any = lambda _: gateway.leave_opening(session)  # noqa: E731
            context.add_done_callback(on_end)
            async for state in session.follow_states():
                response = pb.OpenEpisodeResponse(
                    state=codec.EPISODE_STATES[state], episode_id=session.episode.episode_id
                )
                if state is EpisodeState.READY:
                    response.ready.CopyFrom(await self._encode_ready(session))
                else:
                    response.detail = codec.replace_surrogates(session.failure or session.trouble)
                    if session.no_grade is not None:
                        response.no_grade = NO_GRADE_REASONS.encode(session.no_grade)
                    response.task_fault = session.task_fault
                yield response

    async def CallTool(self, request: pb.CallToolRequest, context: Context) -> pb.CallToolResponse:
        timeout_s = self._gateway.config.call_timeout_s
        if request.HasField("deadline"):
            timeout_s = min(timeout_s, rpc.to_seconds(request.deadline))
        with _translating_refusals():
            session = self._gateway.get_session(request.episode_id)
            answer, replayed = await self._gateway.call_tool(
                session, request.call_seq, request.name, request.arguments_json, timeout_s
            )
        return codec.encode_answer(answer, replayed=replayed)

    async def Grade(
        self, request_iterator: AsyncIterator[pb.GradeRequest], context: Context
    ) -> pb.GradeResponse:
        try:
            async with aclosing(read_paced(request_iterator, _STALL_S)) as parts:
                with _translating_refusals(), self._reading_transcript() as transcript:
                    header = await self._read_grade_request(parts, transcript)
                    conversation = await conversation_of(transcript) if transcript else None
        except ServiceError:
            await self._refused_streams.drain_stream(request_iterator)
            raise
        timeout_s = self._gateway.config.max_budget_s
        if header.HasField("deadline"):
            timeout_s = rpc.to_seconds(header.deadline)
        answer = header.final_answer if header.HasField("final_answer") else None
        with _translating_refusals():
            session = self._gateway.get_session(header.episode_id)
            grade = await self._gateway.grade_episode(
                session, answer, conversation, timeout_s, again=header.again
            )
        return codec.encode_grade(grade)

    async def RenewEpisodes(
        self, request: pb.RenewEpisodesRequest, context: Context
    ) -> pb.RenewEpisodesResponse:
        lost = self._gateway.renew_leases(request.worker_id, list(request.episode_ids))
        return pb.RenewEpisodesResponse(lost_episode_ids=lost)

    async def CloseEpisode(
        self, request: pb.CloseEpisodeRequest, context: Context
    ) -> pb.CloseEpisodeResponse:
        self._gateway.close(request.episode_id)
        return pb.CloseEpisodeResponse()

    async def FetchMedia(
        self, request: pb.FetchMediaRequest, context: Context
    ) -> AsyncIterator[pb.FetchMediaResponse]:
        with _translating_refusals():
            session = self._gateway.get_session(request.episode_id)
        media = session.media.get_media(request.sha256)
        if media is None:
            message = f"episode {request.episode_id} keeps no bytes under {request.sha256.hex()}"
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "MEDIA_LOST", message, domain=_DOMAIN)
        for start in range(0, len(media.data), _CHUNK_BYTES):
            yield pb.FetchMediaResponse(chunk=media.data[start : start + _CHUNK_BYTES])

    async def WatchCapacity(
        self, request: pb.WatchCapacityRequest, context: Context
    ) -> AsyncIterator[pb.WatchCapacityResponse]:
        self._watches += 1
        # Not in a `finally`: see OpenEpisode.
        on_end: Any = self._end_watch
        context.add_done_callback(on_end)
        gateway = self._gateway
        loop = asyncio.get_running_loop()
        until = loop.time() + gateway.config.watch_age_s
        last: pb.WatchCapacityResponse | None = None
        while loop.time() < until:
            current = pb.WatchCapacityResponse(
                open_episodes=gateway.admission.held_places,
                limit=0 if gateway.draining else gateway.admission.max_episodes,
                queued=gateway.admission.waiting,
            )
            if current != last:
                last = current
                yield current
                await asyncio.sleep(max(_WATCH_PERIOD_S, _WATCH_SHARE_S * self._watches))
                continue
            try:
                async with asyncio.timeout_at(until):
                    await gateway.capacity_changed.next_change.wait()
            except TimeoutError:
                return

    def _end_watch(self, context: object) -> None:
        self._watches -= 1

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        return codec.encode_status(self._gateway)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._gateway.draining = True
        self._request_drain()
        return pb.DrainResponse(open_episodes=len(self._gateway.book))

    async def _encode_ready(self, session: Session) -> pb.EpisodeReady:
        transcript_bytes = await self._gateway.get_transcript_limit(session)
        return codec.encode_ready(
            session,
            lease_ttl_s=self._gateway.config.lease_ttl_s,
            remaining_s=session.episode.ends_at - loop_time(),
            transcript_bytes=transcript_bytes,
        )

    @contextmanager
    def _reading_transcript(self) -> Generator[bytearray]:
        """Yield a buffer for a transcript, counted until the block ends."""
        transcript = bytearray()
        try:
            yield transcript
        finally:
            self.reading_bytes -= len(transcript)

    async def _read_grade_request(
        self, requests: AsyncIterator[pb.GradeRequest], transcript: bytearray
    ) -> pb.GradeHeader:
        header: pb.GradeHeader | None = None
        limit = 0
        async for request in requests:
            if (header is None) != request.HasField("header"):
                raise _bad_grade_request("a grade is one header, then transcript chunks")
            if header is None:
                header = request.header
                # A transcript for no episode is not read.
                session = self._gateway.get_session(header.episode_id)
                limit = await self._gateway.get_transcript_limit(session)
            if limit == 0:
                continue
            if self.reading_bytes + len(request.transcript_chunk) > max(_MOST_READ_BYTES, limit):
                raise QueueFullError("too many transcripts are on their way: send it again, later")
            transcript += request.transcript_chunk
            self.reading_bytes += len(request.transcript_chunk)
            if len(transcript) > limit:
                raise _bad_grade_request(
                    f"the transcript exceeds {limit} bytes; send less, or raise "
                    "env_gateway.limits.transcript_bytes"
                )
        if header is None:
            raise _bad_grade_request("a grade needs a header that names the episode")
        # gRPC ends the stream of a caller that went away like any other.
        if limit and len(transcript) != header.transcript_bytes:
            raise _bad_grade_request(
                f"the transcript has {len(transcript)} bytes, and {header.transcript_bytes} by "
                "GradeHeader.transcript_bytes: it was cut off, or that is not set"
            )
        return header


async def conversation_of(transcript: bytearray) -> str:
    """Convert JSON lines to the one JSON array that Fleet's verifiers receive."""
    return await run_aside(len(transcript), lambda: _joined(transcript))


def _joined(transcript: bytearray) -> str:
    lines = transcript.decode("utf-8", "replace").split("\n")
    return f"[{', '.join(line for line in lines if line.strip())}]"


@contextmanager
def _translating_refusals() -> Generator[None]:
    """Translate the core's refusals into the contract's errors."""
    try:
        yield
    except tuple(_STATUS_BY_ERROR) as error:
        code, reason = _STATUS_BY_ERROR[type(error)]
        delay_s = _QUEUE_RETRY_S if isinstance(error, QueueFullError | StalledError) else None
        raise ServiceError(
            code, reason, str(error), domain=_DOMAIN, retry_delay_s=delay_s
        ) from error


def _bad_grade_request(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST", message, domain=_DOMAIN)
