"""Stream of ReadRunFiles: files of a run for remote readers."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.telemetry import log
from services.launcher.api.stream_age import check_age
from services.launcher.control.launcher import refusal_error
from services.launcher.store.ledger import StoredRun
from services.launcher.store.relayed_files import (
    DIGEST_BYTES,
    KnownCopy,
    NoJournalError,
    NoRoomError,
    RelayedFile,
    RunFiles,
    TooLargeError,
    is_relayed,
    opened_files,
)

_log = log.get_logger(__name__)


class RunFilesStream:
    """Streams of runs' files. They copy one journal at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copying = asyncio.Lock()

    async def send(
        self, stored: StoredRun, request: pb.ReadRunFilesRequest, stream_age_s: float
    ) -> AsyncGenerator[pb.ReadRunFilesResponse]:
        """Yield the files and blocks that the caller lacks. Raises ServiceError."""
        known = _known_from_pb(request)
        deadline = time.monotonic() + stream_age_s
        opening = opened_files(self._folder / stored.run.run_id, known)
        with _refusals(stored):
            async with self._copying:
                files = await asyncio.to_thread(opening.__enter__)
        try:
            listed = pb.RunFileList(files=[_file_to_pb(file) for file in files.files])
            yield pb.ReadRunFilesResponse(files=listed)
            for file in files.changed():
                async for part in _send_file(files, file, deadline):
                    yield part
        finally:
            opening.__exit__(None, None, None)


async def _send_file(
    files: RunFiles, file: RelayedFile, deadline: float
) -> AsyncGenerator[pb.ReadRunFilesResponse]:
    blocks = files.read_changed(file)
    while True:
        try:
            found = await asyncio.to_thread(next, blocks, None)
        except OSError as error:
            # Pruned since it was listed; the next call no longer lists it.
            _log.info("cannot send a file of a run", path=file.path, error=str(error))
            return
        if found is None:
            yield pb.ReadRunFilesResponse(complete=file.path)
            return
        offset, data = found
        yield pb.ReadRunFilesResponse(block=pb.FileBlock(path=file.path, offset=offset, data=data))
        check_age(deadline)


def _known_from_pb(request: pb.ReadRunFilesRequest) -> Mapping[str, KnownCopy]:
    for file in request.known:
        if len(file.block_digests) % DIGEST_BYTES:
            message = f"block_digests of {file.path!r} must consist of {DIGEST_BYTES}-byte digests"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_DIGESTS", message)
    return {
        file.path: KnownCopy(file.version, file.block_digests)
        for file in request.known
        if is_relayed(file.path)
    }


@contextmanager
def _refusals(stored: StoredRun) -> Generator[None]:
    run_id = stored.run.run_id
    try:
        yield
    except NoJournalError as error:
        message = _describe_no_journal(stored)
        raise refusal_error(StatusCode.FAILED_PRECONDITION, "NO_JOURNAL", message) from error
    except TooLargeError as error:
        message = (
            f"run {run_id}: {error}; run `flotilla inspect {run_id}` on the launcher's machine,"
            " in its folder"
        )
        raise refusal_error(StatusCode.FAILED_PRECONDITION, "TOO_LARGE", message) from error
    except NoRoomError as error:
        message = f"run {run_id}: {error}"
        raise refusal_error(StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM", message) from error


def _describe_no_journal(stored: StoredRun) -> str:
    run_id = stored.run.run_id
    if stored.run.backend == "local":
        return f"run {run_id} has no journal yet: its learner has not begun"
    there = (
        f"run {run_id} trains on rented machines: its journal is on the learner's machine, and the"
        " launcher holds no copy"
    )
    remote = _remote_of(json.loads(stored.spec_json))
    if not remote:
        return (
            f"{there}. It is not uploaded, because learner.checkpoint.remote is not set: run"
            f" `flotilla inspect {run_id} --bundle OUT.zip` on that machine, in the folder with its"
            " runs, and copy the file"
        )
    url = f"{remote.rstrip('/')}/{run_id}"
    return (
        f"{there}. Its dumps are in {url}/dumps, and its last checkpoint, with the journal, is"
        f" restored by `python -m services.learner.checkpoints.restore_command {url} --config SPEC"
        f" --runs kept`; then `flotilla inspect {run_id} --runs kept` and `flotilla"
        f" export-trajectories {run_id} --runs kept --out DIR` read it here"
    )


def _remote_of(spec: Any) -> str:
    for key in ("learner", "checkpoint", "remote"):
        spec = spec.get(key) if isinstance(spec, dict) else None
    return spec if isinstance(spec, str) else ""


def _file_to_pb(file: RelayedFile) -> pb.RunFile:
    modified = Timestamp()
    modified.FromNanoseconds(file.modified_ns)
    return pb.RunFile(path=file.path, version=file.version, size=file.size, modify_time=modified)
