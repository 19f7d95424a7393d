"""Finds the launcher of a runs folder, or starts one for as long as a command needs it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from services.common import rpc
from services.common.interpreter import python
from services.launcher import launcher_address
from services.launcher.cli import hints
from services.launcher.cli.interrupts import Interrupts
from services.launcher.launcher_address import Address
from services.launcher.security.certificates import LAUNCHER
from services.launcher.state import SUSPECTED_FOR_S
from services.launcher.store.logs import last_lines

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

LOG = "launcher.log"
_POLL_S = 0.05
# Ending what a dead launcher left running is part of a start.
_START_TIMEOUT_S = 60.0
# Should this command be killed, its launcher sees the run through and then goes.
_IDLE_EXIT_S = 30.0
# A launcher that has been away for so long is not waited for; its runs go on or end without us.
PATIENCE_S = 900.0
_PAUSE_S = 2.0
_ASK_S = 5.0
# Of one call of StartRun, which is repeated: the launcher goes on with what the first one asked.
_START_S = 15.0
# How often a launcher here that has not answered yet is looked for.
_LOOK_S = 0.5
# What a call ends with that has found nobody, or nobody of its own CA.
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


# What a call may end with that is worth another one.
PASSING = (*_SILENT, grpc.StatusCode.CANCELLED)
T = TypeVar("T")


class LauncherError(Exception):
    """No launcher could be had; the message says why."""


class LauncherGoneError(LauncherError):
    """The launcher here has died; another can go on."""


@dataclass(slots=True)
class Connection:
    """A launcher to talk to. `own` is its process if this command started it."""

    runs: Path
    stub: "RunServiceAsyncStub"
    address: Address
    own: asyncio.subprocess.Process | None

    def alive(self) -> bool:
        """Whether another try is worth it; of a launcher elsewhere nobody can say."""
        return self.address.elsewhere or launcher_address.read(self.runs) == self.address

    async def ask(self, call: Awaitable[T]) -> T:
        """The answer to a call, however long that may take. For a launcher that is not there gRPC
        waits until the deadline; of one here it is known within a second that it has died. Raises
        LauncherGoneError."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
                if not self.alive():
                    raise self.gone()
            return answer.result()
        except grpc.aio.AioRpcError as error:
            if error.code() in PASSING and not self.alive():
                raise self.gone() from error
            raise
        finally:
            answer.cancel()

    def gone(self) -> LauncherGoneError:
        return LauncherGoneError(
            f"the launcher (process {self.address.pid}) has died, see {self.runs / LOG}; its runs"
            " go on, and the same command again starts another launcher, which takes them over"
        )

    async def answers(self) -> bool:
        """Whether it is there: to an absent one a call waits until its deadline, as to a quiet
        run. Raises LauncherGoneError."""
        try:
            await self.ask(self.stub.ListRuns(pb.ListRunsRequest(), timeout=_ASK_S))
        except grpc.aio.AioRpcError as error:
            return rpc.service_error(error) is not None
        return True

    def cancelling(self, request_id: str) -> str:
        """The command that ends what a request began."""
        return hints.command("cancel", request_id, runs=self.runs)


class Patience:
    """How much longer a launcher that does not answer is asked again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.heard()

    def heard(self) -> None:
        """It has answered: the time begins anew."""
        self._deadline = time.monotonic() + PATIENCE_S

    async def outlast(self, error: grpc.aio.AioRpcError) -> None:
        """The same after a stream that was cut, unless it answers. Raises LauncherError."""
        if await self._connection.answers():
            self.heard()
        else:
            await self.pause(error)

    async def pause(self, error: grpc.aio.AioRpcError) -> None:
        """Wait a little before the next try. Raises LauncherError when none is worth it."""
        if not self._connection.alive():
            raise self._connection.gone() from error
        if time.monotonic() > self._deadline:
            raise LauncherError("the launcher is gone; its runs are not ended by that") from error
        await asyncio.sleep(_PAUSE_S)


async def start_run(connection: Connection, request: pb.StartRunRequest) -> str:
    """Start a run, and return its id. Raises LauncherError, and AioRpcError for a refusal."""
    patience = Patience(connection)
    while True:
        try:
            call = connection.stub.StartRun(request, timeout=_START_S)
            return (await connection.ask(call)).run_id
        except grpc.aio.AioRpcError as error:
            if error.code() not in PASSING or rpc.service_error(error) is not None:
                raise
            await patience.outlast(error)


def told(error: grpc.aio.AioRpcError) -> str:
    """What a call failed of; of a launcher elsewhere also what to look at."""
    known = rpc.service_error(error)
    text = known.message if known else f"{error.code().name}: {error.details()}"
    if launcher_address.from_environment() is None:
        return text
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"{text}: {launcher_address.REMOTE_VARIABLE} is not what the launcher's launcher.json"
            " holds today; copy it again"
        )
    if known is None and error.code() in _SILENT:
        return (
            f"the launcher that {launcher_address.REMOTE_VARIABLE} names does not answer ({text}):"
            " see that it runs and is reached from here, and whether its launcher.json has changed"
        )
    return text


@asynccontextmanager
async def connected(
    runs: Path, interrupts: Interrupts, *, start: bool
) -> AsyncGenerator[Connection]:
    """Talk to the launcher that FLOTILLA_LAUNCHER names, else to that of `runs`. With `start`, one
    is started where none runs, and stopped in the end unless it has other work. Raises
    LauncherError."""
    address, own = launcher_address.from_environment() or launcher_address.read(runs), None
    try:
        if address is None:
            if not start:
                raise LauncherError(f"no launcher is running for {runs}")
            await asyncio.to_thread(runs.mkdir, parents=True, exist_ok=True)
            own = await _spawn(runs)
            address = await interrupts.unless(_address_of(runs, own))
        async with rpc.channel(
            address.address, token=address.token, tls=address.tls, peer=LAUNCHER
        ) as channel:
            stub: Any = RunServiceStub(channel)
            connection = Connection(runs, stub, address, own)
            yield connection
            if own is not None and await _busy(connection):
                own = None
    finally:
        if own is not None:
            await _stop(own, interrupts)


async def _spawn(runs: Path) -> asyncio.subprocess.Process:
    """Start a launcher in a session of its own: a Ctrl-C in this terminal is not meant for it."""
    options = ("--runs", str(runs), "--idle-exit", str(_IDLE_EXIT_S))
    with (runs / LOG).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *python("-m", "services.launcher", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


async def _address_of(runs: Path, own: asyncio.subprocess.Process) -> Address:
    """Wait until it serves; somebody else's launcher that was faster will do as well."""
    log = runs / LOG
    for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
        address = launcher_address.read(runs)
        if address is not None:
            return address
        if own.returncode is not None and own.returncode < 0:
            number = signal.Signals(-own.returncode).name
            raise LauncherGoneError(f"the launcher was ended by {number} as it started; see {log}")
        if own.returncode is not None and own.returncode != 0:
            raise LauncherError(f"the launcher did not start:\n{last_lines(log)}")
        await asyncio.sleep(_POLL_S)
    raise LauncherError(f"the launcher does not answer after {_START_TIMEOUT_S:g} s; see {log}")


async def _busy(connection: Connection) -> bool:
    """Whether the launcher has runs that somebody else waits for, or has to look for what one has
    left: it goes by itself when it has not."""
    try:
        call = connection.stub.ListRuns(pb.ListRunsRequest(), timeout=_ASK_S)
        answer = await connection.ask(call)
    except (grpc.aio.AioRpcError, LauncherGoneError):
        # It is not there any more, or stuck: stopping it is right either way.
        return False
    return any(in_hand(run) for run in answer.runs)


def in_hand(run: pb.Run) -> bool:
    """Whether its launcher must not go yet."""
    if run.state not in (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED):
        return True
    recent = time.time() < run.end_time.seconds + SUSPECTED_FOR_S
    return run.cleanup == pb.CLEANUP_LEAK_SUSPECTED and recent


async def _stop(own: asyncio.subprocess.Process, interrupts: Interrupts) -> None:
    """SIGTERM, which drains its runs; on a second Ctrl-C another, which ends them at once."""
    with suppress(ProcessLookupError):
        own.terminate()
    gone = asyncio.create_task(own.wait())
    hurry = asyncio.create_task(interrupts.second.wait())
    await asyncio.wait({gone, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not gone.done():
        with suppress(ProcessLookupError):
            os.kill(own.pid, signal.SIGTERM)
    await gone
