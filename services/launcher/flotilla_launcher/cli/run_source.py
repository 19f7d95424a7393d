"""Sources of runs: the ledger of a local runs folder, or a remote launcher."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Protocol

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_launcher.api import codec
from flotilla_launcher.api.run_pages import list_page
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.launcher_client import LauncherConnection, connect_to_launcher
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.security import launcher_address
from flotilla_launcher.security.launcher_address import REMOTE_VARIABLE
from flotilla_launcher.store.ledger import Ledger, StoredRun
from flotilla_launcher.store.logs import find_tail_position, list_sources, read_lines
from flotilla_launcher.store.run_files import JOURNAL

NEWEST = "newest"
_LEDGER = "launcher.sqlite"
_CALL_S = 15.0
_STREAM_S = 60.0


class NoRunError(CommandError):
    """Raised when the requested run does not exist."""


class RunSource(Protocol):
    """The runs of one launcher."""

    async def ensure_attended(self) -> None:
        """Ensure that live runs have a launcher. Raises NoRunError, LauncherError."""
        ...

    async def list_runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        """Return a page of runs. Raises NoRunError if there are no runs at all."""
        ...

    async def get_run(self, run_id: str) -> pb.Run:
        """Return one run. Raises NoRunError."""
        ...

    def read_logs(self, request: pb.TailLogsRequest) -> AsyncIterator[pb.TailLogsResponse]:
        """Yield the last log lines of a run so far."""
        ...

    def open_launcher(self) -> AbstractAsyncContextManager[LauncherConnection]:
        """Connect to the launcher itself. Raises LauncherError."""
        ...

    def display_path(self, path: str) -> str:
        """Format a path on the launcher's machine for this user."""
        ...


@asynccontextmanager
async def open_run_source(runs: Path, interrupts: Interrupts) -> AsyncGenerator[RunSource]:
    """Open the source that FLOTILLA_LAUNCHER names, else that of `runs`. Raises ConfigError if
    the variable is not a copy of a launcher.json."""
    if launcher_address.address_from_environment() is None:
        yield LocalRunSource(runs, interrupts)
        return
    async with connect_to_launcher(runs, interrupts, start=False) as connection:
        yield RemoteRunSource(connection)


async def find_run(known: RunSource, run_id: str) -> pb.Run:
    """Return a run by its id, or the `newest`. Raises NoRunError."""
    if run_id != NEWEST:
        return await known.get_run(run_id)
    for run in (await known.list_runs(pb.ListRunsRequest(page_size=1))).runs:
        return await known.get_run(run.run_id)
    raise NoRunError("there are no runs yet")


class LocalRunSource:
    """Runs in the local ledger, which is readable without a launcher."""

    def __init__(self, runs: Path, interrupts: Interrupts) -> None:
        self._runs = runs
        self._interrupts = interrupts

    async def ensure_attended(self) -> None:
        """Start a launcher if live runs have lost theirs; it stays while runs are active."""
        with _open_ledger(self._runs) as store:
            if not store.list_unended():
                return
        async with self.open_launcher():
            return

    async def list_runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        if request.after_run_id:
            find_local_run(request.after_run_id, self._runs)
        with _open_ledger(self._runs) as store:
            return list_page(store, self._runs, request)

    async def get_run(self, run_id: str) -> pb.Run:
        return codec.run_to_pb(find_local_run(run_id, self._runs), self._runs)

    async def read_logs(self, request: pb.TailLogsRequest) -> AsyncGenerator[pb.TailLogsResponse]:
        for path in list_sources(self._runs / request.run_id, request.service).values():
            begin = find_tail_position(path, request.lines)
            for line in read_lines(path, begin, limit=path.stat().st_size + 1):
                yield pb.TailLogsResponse(source=line.source, line=line.text, after_bytes=line.end)

    def open_launcher(self) -> AbstractAsyncContextManager[LauncherConnection]:
        """Connect to the local launcher; start one if none runs."""
        return connect_to_launcher(self._runs, self._interrupts, start=True)

    def display_path(self, path: str) -> str:
        return path


class RemoteRunSource:
    """Runs of a remote launcher, with no local files."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._stub = connection.stub
        self._name = f"the launcher at {connection.address.address}"

    async def ensure_attended(self) -> None:
        """Do nothing: the remote launcher attends its runs itself."""

    async def list_runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        with self._explain_missing(request.after_run_id):
            answer = await self._stub.ListRuns(request, timeout=_CALL_S)
        every = not (request.states or request.name or request.HasField("since"))
        if not answer.runs and every and not request.after_run_id:
            raise NoRunError(f"there are no runs at {self._name}; `flotilla submit` starts one")
        return answer

    async def get_run(self, run_id: str) -> pb.Run:
        with self._explain_missing(run_id):
            answer = await self._stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=_CALL_S)
        return answer.run

    @contextmanager
    def _explain_missing(self, run_id: str) -> Generator[None]:
        """Raise NoRunError in place of the launcher's own words for a run that it does not know."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            known = rpc.service_error(error)
            if known is None or known.reason != "UNKNOWN_RUN":
                raise
            message = f"there is no run {run_id!r} at {self._name}; `flotilla status` lists them"
            raise NoRunError(message) from error

    async def read_logs(self, request: pb.TailLogsRequest) -> AsyncGenerator[pb.TailLogsResponse]:
        async for line in self._stub.TailLogs(request, timeout=_STREAM_S):
            yield line

    @asynccontextmanager
    async def open_launcher(self) -> AsyncGenerator[LauncherConnection]:
        yield self._connection

    def display_path(self, path: str) -> str:
        return f"{path} on {split_host_port(self._connection.address.address, 'launcher')[0]}"


@contextmanager
def _open_ledger(runs: Path) -> Generator[Ledger]:
    """Open the local ledger. Raises NoRunError if there is none."""
    if not (runs / _LEDGER).exists():
        raise NoRunError(f"there are no runs in {runs}; `flotilla train SPEC` starts one")
    with closing(Ledger(runs / _LEDGER)) as store:
        yield store


def find_local_run(run_id: str, runs: Path) -> StoredRun:
    """Return a run of the local ledger by its id, or the `newest`. Raises NoRunError."""
    with _open_ledger(runs) as store:
        newest = store.list_newest(limit=1) if run_id == NEWEST else []
        found = next(iter(newest), None) or store.get_run(run_id)
    if found is None:
        raise NoRunError(f"there is no run {run_id!r} in {runs}; `flotilla status` lists them")
    return found


def find_stored_run(run_id: str, runs: Path) -> StoredRun:
    """Return a stored run for reading its files, by its id or `newest`. Raises NoRunError."""
    try:
        return find_local_run(run_id, runs)
    except NoRunError as error:
        if not os.environ.get(REMOTE_VARIABLE, "").strip():
            raise
        message = (
            f"there is no run {run_id!r} in {runs}. This command reads a run's files: use it on the"
            f" machine of the launcher that {REMOTE_VARIABLE} names, in its folder"
        )
        raise NoRunError(message) from error


def find_run_dir(run_id: str, runs: Path) -> Path:
    """Return the folder of a run, from the ledger or from its journal alone. Raises NoRunError."""
    if run_id != NEWEST and (runs / run_id / JOURNAL).exists():
        return runs / run_id
    return runs / find_stored_run(run_id, runs).run.run_id
