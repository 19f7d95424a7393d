"""Where runs are known: in the ledger of a runs folder here, or at a launcher elsewhere."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.common.network import split
from services.launcher import launcher_address
from services.launcher.api import codec
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.launcher_client import Connection, connected
from services.launcher.store.ledger import Store, StoredRun
from services.launcher.store.logs import read, sources, tail_position

_CALL_S = 15.0
_STREAM_S = 60.0


class NoRunError(Exception):
    """The run that was asked for is not there."""


class KnownRuns(Protocol):
    """What is to be known of the runs of one launcher."""

    async def attend(self) -> None:
        """See that runs which go on have a launcher. Raises NoRunError, LauncherError."""
        ...

    async def newest(self) -> Sequence[pb.Run]:
        """All runs, newest first, without specs and most metrics. Raises NoRunError."""
        ...

    async def get(self, run_id: str) -> pb.Run:
        """Raises NoRunError."""
        ...

    def logged(self, request: pb.TailLogsRequest) -> AsyncIterator[pb.TailLogsResponse]:
        """The last lines that a run has logged up to now."""
        ...

    def launcher(self) -> AbstractAsyncContextManager[Connection]:
        """The launcher itself, to be asked for more. Raises LauncherError."""
        ...

    def place(self, path: str) -> str:
        """A path of the launcher's machine, as one reads it here."""
        ...


@asynccontextmanager
async def known_runs(runs: Path, interrupts: Interrupts) -> AsyncGenerator[KnownRuns]:
    """Those of the launcher that FLOTILLA_LAUNCHER names, else those of `runs`. Raises ConfigError
    for what is no copy of a launcher.json."""
    if launcher_address.from_environment() is None:
        yield LedgerHere(runs, interrupts)
        return
    async with connected(runs, interrupts, start=False) as connection:
        yield LauncherElsewhere(connection)


async def look_up(known: KnownRuns, run_id: str) -> pb.Run:
    """A run by its id, or the `newest`. Raises NoRunError."""
    if run_id != "newest":
        return await known.get(run_id)
    for run in await known.newest():
        return await known.get(run.run_id)
    raise NoRunError("there are no runs yet")


class LedgerHere:
    """The ledger is there whether a launcher runs or not."""

    def __init__(self, runs: Path, interrupts: Interrupts) -> None:
        self._runs = runs
        self._interrupts = interrupts

    async def attend(self) -> None:
        """A run whose launcher died is given another, which stays for as long as runs go on."""
        if all(stored.run.state.ended for stored in _ledger(self._runs)):
            return
        async with self.launcher():
            return

    async def newest(self) -> Sequence[pb.Run]:
        return [codec.run(stored, self._runs, brief=True) for stored in _ledger(self._runs)]

    async def get(self, run_id: str) -> pb.Run:
        return codec.run(find_here(run_id, self._runs), self._runs)

    async def logged(self, request: pb.TailLogsRequest) -> AsyncGenerator[pb.TailLogsResponse]:
        for path in sources(self._runs / request.run_id, request.service).values():
            begin = tail_position(path, request.lines)
            for line in read(path, begin, limit=path.stat().st_size + 1):
                yield pb.TailLogsResponse(source=line.source, line=line.text, after_bytes=line.end)

    def launcher(self) -> AbstractAsyncContextManager[Connection]:
        """One is started where none runs."""
        return connected(self._runs, self._interrupts, start=True)

    def place(self, path: str) -> str:
        return path


class LauncherElsewhere:
    """It knows its runs; here is nothing of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = connection.stub
        self._name = f"the launcher at {connection.address.address}"

    async def attend(self) -> None:
        """It is asked itself."""

    async def newest(self) -> Sequence[pb.Run]:
        answer = await self._stub.ListRuns(pb.ListRunsRequest(), timeout=_CALL_S)
        if not answer.runs:
            raise NoRunError(f"there are no runs at {self._name}; `flotilla submit` makes one")
        return answer.runs

    async def get(self, run_id: str) -> pb.Run:
        try:
            answer = await self._stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            known = rpc.service_error(error)
            if known is None or known.reason != "UNKNOWN_RUN":
                raise
            message = f"there is no run {run_id!r} at {self._name}; `flotilla status` lists them"
            raise NoRunError(message) from error
        return answer.run

    async def logged(self, request: pb.TailLogsRequest) -> AsyncGenerator[pb.TailLogsResponse]:
        async for line in self._stub.TailLogs(request, timeout=_STREAM_S):
            yield line

    @asynccontextmanager
    async def launcher(self) -> AsyncGenerator[Connection]:
        yield self._connection

    def place(self, path: str) -> str:
        return f"{path} on {split(self._connection.address.address, 'launcher')[0]}"


def _ledger(runs: Path) -> list[StoredRun]:
    path = runs / "launcher.sqlite"
    if not path.exists():
        raise NoRunError(f"there are no runs in {runs}; `flotilla train SPEC` makes one")
    store = Store(path)
    found = store.newest()
    store.close()
    return found


def find_here(run_id: str, runs: Path) -> StoredRun:
    """A run of the ledger here by its id, or the `newest`. Raises NoRunError."""
    for stored in _ledger(runs):
        if run_id in ("newest", stored.run.run_id):
            return stored
    raise NoRunError(f"there is no run {run_id!r} in {runs}; `flotilla status` lists them")
