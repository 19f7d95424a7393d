"""WeightService in a process of its own: `python -m flotilla_learner.weights.weight_server`.

A child of the learner service, so that a slow download never delays a lease. The first line of
its stdin is a `WeightServerConfig`, including secrets; it answers with one JSON line `{"address":
"HOST:PORT"}`, then reads a publication per line and answers each with `{"announced":
[run_epoch, version]}`. It ends when its stdin does, so it never outlives its parent."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from flotilla.learner.v1 import weight_service_pb2 as pb
from flotilla.learner.v1 import weight_service_pb2_grpc as pb_grpc
from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.tls import from_text
from flotilla_common.telemetry import log
from flotilla_common.text.json_lines import decode_line, encode_line
from flotilla_common.text.redaction import add_secret
from flotilla_common.weights.weight_delta import BLOCK_BYTES
from flotilla_learner.weights.weight_deltas import DeltaShelf, WeightDelta, read_change
from flotilla_learner.weights.weight_snapshots import (
    SnapshotCache,
    SupersededError,
    WeightSnapshot,
)

DOMAIN = "learner.flotilla"
CHUNK_BYTES = BLOCK_BYTES
# An unread fetch holds a chunk or two, and a file; callers beyond the limit must retry.
MOST_STREAMS = {"/flotilla.learner.v1.WeightService/FetchWeights": 128}


@dataclass(frozen=True, slots=True)
class WeightServerConfig:
    """Configuration of the server: its address, and its authorised callers."""

    run_id: str
    token: str = field(repr=False)
    # As encoded by `Tls.to_text`; None serves without TLS.
    tls: str | None = field(default=None, repr=False)
    listen: str = "127.0.0.1:0"
    # Address for others, if different.
    advertise: str | None = None
    # Send differences to workers that hold an older publication.
    delta: bool = True


class WeightService(pb_grpc.WeightServiceServicer):
    """Streams the publications that are held."""

    def __init__(self, shelf: SnapshotCache, deltas: DeltaShelf | None) -> None:
        self._shelf = shelf
        self._deltas = deltas

    async def FetchWeights(
        self, request: pb.FetchWeightsRequest, context: grpc.ServicerContext
    ) -> AsyncIterator[pb.FetchWeightsResponse]:
        """Stream a publication; see the contract. A fetch that is overtaken ends with
        VERSION_SUPERSEDED."""
        policy = request.policy
        wanted = (policy.run_epoch, policy.version, policy.fingerprint)
        snapshot = self._find_snapshot(*wanted)
        offset = request.offset_bytes
        if not 0 <= offset <= snapshot.total_bytes:
            raise ServiceError(
                grpc.StatusCode.OUT_OF_RANGE,
                "BAD_OFFSET",
                f"offset {offset} of a publication of {snapshot.total_bytes} bytes",
                domain=DOMAIN,
            )
        deltas = self._find_deltas(request, snapshot)
        with open(snapshot.path, "rb") as file:  # noqa: ASYNC230 - memory, not a disk
            while offset < snapshot.total_bytes:
                size = min(CHUNK_BYTES, snapshot.total_bytes - offset)
                delta = None
                if deltas is not None and offset % BLOCK_BYTES == 0:
                    delta = await read_change(deltas, snapshot.path, offset // BLOCK_BYTES)
                chunk = delta or os.pread(file.fileno(), size, offset)
                # Checked after the read: bytes read before it was overtaken are valid.
                self._find_snapshot(*wanted)
                yield pb.FetchWeightsResponse(
                    chunk=chunk, offset_bytes=offset, delta_bytes=size if delta else 0
                )
                offset += size if delta else len(chunk)

    def _find_deltas(
        self, request: pb.FetchWeightsRequest, wanted: WeightSnapshot
    ) -> tuple[WeightDelta, ...] | None:
        if self._deltas is None or not request.HasField("held"):
            return None
        return self._deltas.find_deltas(request.held.fingerprint, wanted)

    def _find_snapshot(self, run_epoch: int, version: int, fingerprint: bytes) -> WeightSnapshot:
        """Find a publication. Raises ServiceError VERSION_SUPERSEDED."""
        try:
            return self._shelf.find_snapshot(run_epoch, version, fingerprint)
        except SupersededError as error:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "VERSION_SUPERSEDED",
                f"{error}; attach again",
                domain=DOMAIN,
            ) from error


async def serve_weights() -> None:
    """Serve until stdin ends."""
    parent = ParentChannel()
    lines = parent.read_lines()
    start = decode_line(WeightServerConfig, next(lines, b""))
    log.setup("weight_server", start.run_id)
    add_secret(start.token)
    tls = from_text(start.tls, where="the learner's TLS") if start.tls else None
    shelf = SnapshotCache()
    server = rpc.server(token=start.token, most_streams=MOST_STREAMS)
    deltas = DeltaShelf(shelf) if start.delta else None
    pb_grpc.add_WeightServiceServicer_to_server(WeightService(shelf, deltas), server)
    at = rpc.serving(server, start.listen, tls=tls, advertise=start.advertise, grace_s=0.5)
    async with at as serving:
        serving.set_serving(True)
        parent.write(encode_line({"address": serving.address}))
        while line := await asyncio.to_thread(next, lines, b""):
            snapshot = decode_line(WeightSnapshot, line)
            shelf.add_snapshot(snapshot)
            if deltas is not None:
                deltas.note_announced()
            parent.write(encode_line({"announced": [snapshot.run_epoch, snapshot.version]}))


def main() -> None:
    # Ctrl-C in a terminal is for the learner service, which closes this stdin when it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve_weights())


if __name__ == "__main__":
    main()
