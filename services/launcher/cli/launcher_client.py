"""Client of the launcher of a runs folder; starts one for as long as a command needs it."""

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
from services.common.concurrency import run_unless
from services.common.python_command import python_command
from services.launcher.cli import command_hints
from services.launcher.cli.interrupts import Interrupts
from services.launcher.security import launcher_address
from services.launcher.security.certificates import LAUNCHER
from services.launcher.security.launcher_address import LauncherAddress
from services.launcher.state import SUSPECTED_FOR_S
from services.launcher.store.logs import read_last_lines

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

LAUNCHER_LOG = "launcher.log"
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
_LIVENESS_POLL_S = 0.5
# What a call ends with that has found nobody, or nobody of its own CA.
_UNREACHABLE_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


# What a call may end with that is worth another one.
TRANSIENT_CODES = (*_UNREACHABLE_CODES, grpc.StatusCode.CANCELLED)
T = TypeVar("T")


class LauncherError(Exception):
    """Raised when no launcher is available; the message says why."""


class LauncherGoneError(LauncherError):
    """Raised when the local launcher has died; another one can take over."""


@dataclass(slots=True)
class LauncherConnection:
    """A connected launcher. `own` is its process if this command started it."""

    runs: Path
    stub: "RunServiceAsyncStub"
    address: LauncherAddress
    own: asyncio.subprocess.Process | None

    def is_alive(self) -> bool:
        """Return whether a retry is worthwhile. A remote launcher always counts as alive:
        nothing here can tell."""
        return self.address.elsewhere or launcher_address.read_address(self.runs) == self.address

    async def await_answer(self, call: Awaitable[T]) -> T:
        """Await the answer to a call, however long it takes. If the launcher is absent, gRPC
        waits until the deadline; the death of a local one is noticed within a second. Raises
        LauncherGoneError."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=_LIVENESS_POLL_S))[0]:
                if not self.is_alive():
                    raise self.make_gone_error()
            return answer.result()
        except grpc.aio.AioRpcError as error:
            if error.code() in TRANSIENT_CODES and not self.is_alive():
                raise self.make_gone_error() from error
            raise
        finally:
            answer.cancel()

    def make_gone_error(self) -> LauncherGoneError:
        return LauncherGoneError(
            f"the launcher (process {self.address.pid}) has died, see"
            f" {self.runs / LAUNCHER_LOG}; its runs"
            " go on, and the same command again starts another launcher, which takes them over"
        )

    async def is_answering(self) -> bool:
        """Probe whether the launcher answers. A stream cannot tell: with an absent launcher it
        stays silent until its deadline, as with a quiet run. Raises LauncherGoneError."""
        try:
            await self.await_answer(self.stub.ListRuns(pb.ListRunsRequest(), timeout=_ASK_S))
        except grpc.aio.AioRpcError as error:
            return rpc.service_error(error) is not None
        return True

    def cancel_command(self, request_id: str) -> str:
        """Format the command that ends what a request began."""
        return command_hints.format_command("cancel", request_id, runs=self.runs)


class ReconnectDeadline:
    """Deadline for reconnecting to a launcher that does not answer."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self.note_answer()

    def note_answer(self) -> None:
        """Restart the deadline: the launcher has answered."""
        self._deadline = time.monotonic() + PATIENCE_S

    async def retry_after_cut(self, error: grpc.aio.AioRpcError) -> None:
        """Wait before reopening a stream that was cut, unless the launcher answers already.
        Raises LauncherError when the deadline has passed."""
        if await self._connection.is_answering():
            self.note_answer()
        else:
            await self.wait_before_retry(error)

    async def wait_before_retry(self, error: grpc.aio.AioRpcError) -> None:
        """Wait briefly before the next try. Raises LauncherError when the launcher is dead or
        the deadline has passed."""
        if not self._connection.is_alive():
            raise self._connection.make_gone_error() from error
        if time.monotonic() > self._deadline:
            raise LauncherError("the launcher is gone; its runs are not ended by that") from error
        await asyncio.sleep(_PAUSE_S)


async def start_run(connection: LauncherConnection, request: pb.StartRunRequest) -> str:
    """Start a run and return its id. Raises LauncherError, and AioRpcError for a refusal."""
    patience = ReconnectDeadline(connection)
    while True:
        try:
            call = connection.stub.StartRun(request, timeout=_START_S)
            return (await connection.await_answer(call)).run_id
        except grpc.aio.AioRpcError as error:
            if error.code() not in TRANSIENT_CODES or rpc.service_error(error) is not None:
                raise
            await patience.retry_after_cut(error)


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """Describe the failure of a call; for a remote launcher also what to check."""
    known = rpc.service_error(error)
    text = known.message if known else f"{error.code().name}: {error.details()}"
    if launcher_address.address_from_environment() is None:
        return text
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"{text}: {launcher_address.REMOTE_VARIABLE} is not what the launcher's launcher.json"
            " holds today; copy it again"
        )
    if known is None and error.code() in _UNREACHABLE_CODES:
        return (
            f"the launcher that {launcher_address.REMOTE_VARIABLE} names does not answer ({text}):"
            " see that it runs and is reached from here, and whether its launcher.json has changed"
        )
    return text


@asynccontextmanager
async def connect_to_launcher(
    runs: Path, interrupts: Interrupts, *, start: bool
) -> AsyncGenerator[LauncherConnection]:
    """Connect to the launcher that FLOTILLA_LAUNCHER names, else to that of `runs`. With
    `start`, start one if none runs, and stop it at the end unless it has other work. Raises
    LauncherError."""
    address, own = (
        launcher_address.address_from_environment() or launcher_address.read_address(runs),
        None,
    )
    try:
        if address is None:
            if not start:
                raise LauncherError(f"no launcher is running for {runs}")
            await asyncio.to_thread(runs.mkdir, parents=True, exist_ok=True)
            own = await _spawn_launcher(runs)
            address = await interrupts.unless_interrupted(_wait_until_serving(runs, own))
        async with rpc.channel(
            address.address, token=address.token, tls=address.tls, peer=LAUNCHER
        ) as channel:
            stub: Any = RunServiceStub(channel)
            connection = LauncherConnection(runs, stub, address, own)
            yield connection
            if own is not None and await _has_other_work(connection):
                own = None
    finally:
        if own is not None:
            await _stop_launcher(own, interrupts)


async def _spawn_launcher(runs: Path) -> asyncio.subprocess.Process:
    """Start a launcher in a session of its own, so that a Ctrl-C in this terminal does not
    reach it."""
    options = ("--runs", str(runs), "--idle-exit", str(_IDLE_EXIT_S))
    with (runs / LAUNCHER_LOG).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *python_command("-m", "services.launcher", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


async def _wait_until_serving(runs: Path, own: asyncio.subprocess.Process) -> LauncherAddress:
    """Wait until the launcher serves. If another process's launcher came up first, its address
    is returned."""
    log = runs / LAUNCHER_LOG
    for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
        address = launcher_address.read_address(runs)
        if address is not None:
            return address
        if own.returncode is not None and own.returncode < 0:
            number = signal.Signals(-own.returncode).name
            raise LauncherGoneError(f"the launcher was ended by {number} as it started; see {log}")
        if own.returncode is not None and own.returncode != 0:
            raise LauncherError(f"the launcher did not start:\n{read_last_lines(log)}")
        await asyncio.sleep(_POLL_S)
    raise LauncherError(f"the launcher does not answer after {_START_TIMEOUT_S:g} s; see {log}")


async def _has_other_work(connection: LauncherConnection) -> bool:
    """Return whether the launcher has runs that others wait for, or leftovers of a run to
    watch. It exits by itself once it has neither."""
    try:
        call = connection.stub.ListRuns(pb.ListRunsRequest(), timeout=_ASK_S)
        answer = await connection.await_answer(call)
    except (grpc.aio.AioRpcError, LauncherGoneError):
        # It is not there any more, or stuck: stopping it is right either way.
        return False
    return any(needs_launcher(run) for run in answer.runs)


def needs_launcher(run: pb.Run) -> bool:
    """Return whether the run's launcher must keep running."""
    if run.state not in (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED):
        return True
    recent = time.time() < run.end_time.seconds + SUSPECTED_FOR_S
    return run.cleanup == pb.CLEANUP_LEAK_SUSPECTED and recent


async def _stop_launcher(own: asyncio.subprocess.Process, interrupts: Interrupts) -> None:
    """Stop the launcher by SIGTERM, which drains its runs; on a second Ctrl-C send another,
    which ends them at once."""
    with suppress(ProcessLookupError):
        own.terminate()
    if await run_unless(interrupts.second, own.wait()) is None:
        with suppress(ProcessLookupError):
            os.kill(own.pid, signal.SIGTERM)
        await own.wait()
