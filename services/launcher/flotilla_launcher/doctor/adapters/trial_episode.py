"""A trial episode at a temporary gateway, retried while its opening may still succeed."""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.domain.transcripts import encode_transcript
from flotilla_common.rpc import rpc
from flotilla_common.text.parsing import as_object
from flotilla_launcher.config.backend_tables import FLEET_BACKENDS, backend_of, backend_tables

# Time in which an error may still pass, as that of a server that is starting.
PATIENCE_S = 6.0
_RENEW_S = 5.0
_FETCH_S = 30.0
# Longest piece of a transcript in one message.
_CHUNK_BYTES = 2**19
# Refusals of what a task says; no backend has such an environment.
_BAD_TASK = ("BAD_TASK", "UNKNOWN_ENVIRONMENT")


class NotOpenedError(Exception):
    """Raised when the environment is not available; the message is the backend's reason.
    `task_fault` if it refused what the task says."""

    def __init__(self, message: str, *, task_fault: bool = False) -> None:
        super().__init__(message)
        self.task_fault = task_fault


def is_slow(section: Mapping[str, Any], env_key: str) -> bool:
    """Return whether instances of an environment may answer with errors until they are up,
    according to the gateway's section of a spec: those of Fleet take minutes."""
    backend = backend_of(section, env_key)
    tables = backend_tables(section, backend or "embedded").values()
    return backend in FLEET_BACKENDS or any(each.get("instances") for each in tables)


def backend_key(section: Mapping[str, Any], backend: str, detail: str) -> str:
    """Return the key of a backend's settings in the spec; of several MCP servers, that of the one
    that `detail` names."""
    tables = backend_tables(section, backend)
    for key, table in tables.items():
        if len(tables) == 1 or f"server {table.get('name')}: " in detail:
            return key
    return "env_gateway.servers"


def make_open_request(task: Mapping[str, Any], who: str) -> pb.OpenEpisodeRequest:
    """Build the request for one episode of a task, in the name of `who`."""
    return pb.OpenEpisodeRequest(
        request_id=uuid.uuid4().hex,
        run_id=who,
        group_id=f"{who}-{uuid.uuid4().hex[:8]}",
        opening=1,
        task_json=json.dumps(task),
        worker_id=f"flotilla-{who}",
    )


async def open_episode(
    stub: Any,
    request: pb.OpenEpisodeRequest,
    *,
    limit_s: float,
    slow: bool,
    take_state: Callable[[pb.OpenEpisodeResponse], None] = lambda _: None,
) -> pb.OpenEpisodeResponse:
    """Open an episode within `limit_s`; `take_state` receives each state. A persistent error ends
    the attempt earlier, unless an existing instance may be `slow` to answer. Raises
    NotOpenedError."""
    loop, last = asyncio.get_running_loop(), pb.OpenEpisodeResponse()
    call = stub.OpenEpisode(request, timeout=limit_s)
    try:
        async with asyncio.timeout(None) as patience:
            async for last in call:
                take_state(last)
                begins = slow and last.state == pb.EPISODE_STATE_WARMING
                if not last.detail or begins:
                    patience.reschedule(None)
                elif patience.when() is None:
                    patience.reschedule(loop.time() + PATIENCE_S)
    except TimeoutError:
        raise NotOpenedError(last.detail) from None
    except grpc.aio.AioRpcError as error:
        refused = rpc.refusal_reason(error) in _BAD_TASK
        raise NotOpenedError(_describe_error(error, last, limit_s), task_fault=refused) from error
    finally:
        # The gateway then closes the episode if it is open.
        call.cancel()
    if last.state != pb.EPISODE_STATE_READY:
        detail = last.detail or "the gateway opened no episode"
        raise NotOpenedError(detail, task_fault=last.task_fault)
    return last


async def keep_renewed(stub: Any, worker_id: str, episode: pb.OpenEpisodeResponse) -> None:
    """Renew an episode's lease until the episode is lost: a turn may take minutes. Never raises."""
    ttl_s = episode.ready.lease_ttl.ToTimedelta().total_seconds()
    request = pb.RenewEpisodesRequest(worker_id=worker_id, episode_ids=[episode.episode_id])
    while True:
        await asyncio.sleep(ttl_s / 3)
        # The next round retries, and the next call shows an episode that expires meanwhile.
        with suppress(grpc.aio.AioRpcError):
            answer = await stub.RenewEpisodes(request, timeout=_RENEW_S)
            if answer.lost_episode_ids:
                return


async def read_part(stub: Any, episode_id: str, part: pb.ContentPart) -> str:
    """Return the text of a part of an answer; a long one is fetched. Raises AioRpcError."""
    if not part.media.mime.startswith("text/"):
        return part_to_text(part)
    return (await read_media(stub, episode_id, part.media)).decode("utf-8", "replace")


async def read_media(stub: Any, episode_id: str, media: pb.Media) -> bytes:
    """Return the bytes of media; those too large for an answer are fetched. Raises AioRpcError."""
    if media.data:
        return media.data
    request = pb.FetchMediaRequest(episode_id=episode_id, sha256=media.sha256)
    return b"".join([piece.chunk async for piece in stub.FetchMedia(request, timeout=_FETCH_S)])


def part_to_text(part: pb.ContentPart) -> str:
    if part.HasField("text"):
        return part.text
    media = part.media
    return f"[{media.mime}, {media.size_bytes} bytes, {media.width}x{media.height}]"


def tool_schema(tool: pb.Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; empty if it is not an object."""
    try:
        return as_object(json.loads(tool.input_schema_json or "{}"))
    except (ValueError, RecursionError):
        return {}


async def grade_episode(
    stub: Any,
    header: pb.GradeHeader,
    messages: Sequence[Mapping[str, str]],
    limit_s: float,
    ready: pb.EpisodeReady,
) -> pb.GradeResponse:
    """Grade an episode by its conversation, as far as the verifier reads it. Raises AioRpcError."""
    transcript = encode_transcript(messages, ready.transcript_bytes)
    starts = range(0, len(transcript), _CHUNK_BYTES)
    chunks = [transcript[start : start + _CHUNK_BYTES] for start in starts]
    header.transcript_bytes = len(transcript)
    requests = [pb.GradeRequest(header=header)]
    requests += [pb.GradeRequest(transcript_chunk=chunk) for chunk in chunks]
    return await stub.Grade(iter(requests), timeout=limit_s)


def passes_wrongly(task: Mapping[str, Any], grade: pb.GradeResponse) -> bool:
    """Return whether the grade of an attempt that did nothing is a pass, though the task does not
    say that doing nothing is right."""
    return grade.reward >= PASS_REWARD and task.get("passes_untouched") is not True


def _describe_error(
    error: grpc.aio.AioRpcError, last: pb.OpenEpisodeResponse, limit_s: float
) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        state = state_name(last)
        return f"not ready after {limit_s:g} s, but {state}{last.detail and f': {last.detail}'}"
    return rpc_error_text(error)


def rpc_error_text(error: grpc.aio.AioRpcError) -> str:
    """Return a gateway's own message about a failed call, or gRPC's."""
    known = rpc.service_error(error)
    return known.message if known else f"{error.code().name}: {error.details()}"


def state_name(response: pb.OpenEpisodeResponse) -> str:
    return pb.EpisodeState.Name(response.state).removeprefix("EPISODE_STATE_").lower()


def outcome_name(answer: pb.CallToolResponse) -> str:
    return pb.ToolOutcome.Name(answer.outcome).removeprefix("TOOL_OUTCOME_").lower()


def no_grade_name(grade: pb.GradeResponse) -> str:
    """Return why an episode that was played alone has no grade."""
    if grade.HasField("to_be_judged"):
        return "to_be_judged"
    name = pb.NoGradeReason.Name(grade.no_grade.reason)
    return name.removeprefix("NO_GRADE_REASON_").lower()


def suggest_backend_fix(detail: str, where: str) -> str:
    """Suggest what to do about an environment that is not available; `where` is the config key
    of its backend."""
    if "mcp.server.fastmcp" in detail:
        return (
            "port the server to mcp 2.x, or give it an interpreter of its own that has mcp 1.x, as"
            f' in {where}.command = ["/path/to/.venv/bin/python", "server.py"]'
        )
    if "has no environment" in detail:
        # The detail names the key that chooses another backend.
        return "or correct env_id of its tasks"
    if "cannot be reached" in detail or "takes no connection" in detail:
        return f"start the server, or correct {where}.url"
    return f"correct {where}, or the task; `flotilla env try` shows more"
