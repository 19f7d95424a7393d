"""Client of a runs folder's launcher; starts one while a command needs it."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import grpc
import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.aio.concurrency import run_unless
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc import rpc
from flotilla_launcher.cli import command_hints
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.security import launcher_address
from flotilla_launcher.security.certificates import LAUNCHER
from flotilla_launcher.security.launcher_address import LauncherAddress
from flotilla_launcher.state import SUSPECTED_FOR_S
from flotilla_launcher.store.logs import read_last_lines

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

LAUNCHER_LOG = "launcher.log"
_POLL_S = 0.05
# A start includes ending the processes of a dead launcher.
_START_TIMEOUT_S = 60.0
# If this command is killed, its launcher finishes the run and then exits.
_IDLE_EXIT_S = 30.0
# Longest wait for an absent launcher; its runs continue or end without this command.
PATIENCE_S = 900.0
_PAUSE_S = 2.0
_PROBE_S = 5.0
# Deadline of one StartRun call; a repeated call joins the start that the first one began.
_START_S = 15.0
# Interval between liveness checks of a local launcher while a call waits.
_LIVENESS_POLL_S = 0.5
# A launcher with less room for its ledger and its log does not start.
_LEAST_ROOM_BYTES = 256 << 10
# Status of a call that found no server, or none with a certificate of the expected CA.
_UNREACHABLE_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


# Status of a call that is worth a retry.
TRANSIENT_CODES = (*_UNREACHABLE_CODES, grpc.StatusCode.CANCELLED)
T = TypeVar("T")


class LauncherError(CommandError):
    """Raised when no launcher is available; the message states the cause."""


class LauncherGoneError(LauncherError):
    """Raised when the local launcher has died; another one can take over."""


class UnwrittenEndError(LauncherError):
    """The user has ended a run whose end the launcher cannot write down."""


@dataclass(slots=True)
class LauncherConnection:
    """Connection to a launcher. `own` is its process if this command started it."""

    runs: Path
    stub: "RunServiceAsyncStub"
    address: LauncherAddress
    own: asyncio.subprocess.Process | None

    def is_alive(self) -> bool:
        """Return whether a retry is worthwhile. A remote launcher always counts as alive: its
        death is not visible from here."""
        return self.address.elsewhere or launcher_address.read_address(self.runs) == self.address

    async def await_answer(self, call: Awaitable[T]) -> T:
        """Await the answer to a call until its deadline. The death of a local launcher is
        detected within a second. Raises LauncherGoneError."""
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
            f" {self.runs / LAUNCHER_LOG}; its runs continue. Repeat the command to start"
            " another launcher, which takes them over"
        )

    async def get_run(self, run_id: str, limit_s: float | None = None) -> pb.Run:
        """Return a run as the launcher has it now."""
        call = self.stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=limit_s)
        return (await self.await_answer(call)).run

    async def stop_run(
        self, grace_s: float, limit_s: float, *, run_id: str = "", request_id: str = ""
    ) -> pb.StopRunResponse:
        """Stop the run with this id, or the run of a request; a request without a run never gets
        one. Wait `limit_s` longer than the grace for its end."""
        grace = rpc.to_duration(grace_s)
        request = pb.StopRunRequest(run_id=run_id, request_id=request_id, grace=grace)
        return await self.await_answer(self.stub.StopRun(request, timeout=grace_s + limit_s))

    async def is_answering(self) -> bool:
        """Return whether the launcher answers. A stream does not show it: it is silent until its
        deadline both without a launcher and for a quiet run. Raises LauncherGoneError."""
        try:
            request = pb.ListRunsRequest(page_size=1)
            await self.await_answer(self.stub.ListRuns(request, timeout=_PROBE_S))
        except grpc.aio.AioRpcError as error:
            return rpc.service_error(error) is not None
        return True

    def cancel_command(self, request_id: str) -> str:
        """Format the command that cancels a request."""
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
        """Wait before reopening a broken stream, unless the launcher answers already. Raises
        LauncherError when the launcher is dead or the deadline has passed."""
        if await self._connection.is_answering():
            self.note_answer()
            return
        if not self._connection.is_alive():
            raise self._connection.make_gone_error() from error
        if time.monotonic() > self._deadline:
            raise LauncherError("the launcher is gone; its runs may continue without it") from error
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
    """Describe the failure of a call; for a remote launcher, include what to check."""
    known = rpc.service_error(error)
    text = known.message if known else f"{error.code().name}: {error.details()}"
    if launcher_address.address_from_environment() is None:
        return text
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"{text}: {launcher_address.REMOTE_VARIABLE} differs from the launcher's current"
            " launcher.json; copy it again"
        )
    if known is None and error.code() in _UNREACHABLE_CODES:
        return (
            f"the launcher that {launcher_address.REMOTE_VARIABLE} names does not answer ({text}):"
            " check that it runs, is reachable from here, and has the same launcher.json"
        )
    return text


@asynccontextmanager
async def connect_to_launcher(
    runs: Path, interrupts: Interrupts, *, start: bool
) -> AsyncGenerator[LauncherConnection]:
    """Connect to the launcher that FLOTILLA_LAUNCHER names, else to the one of `runs`. With
    `start`, start one if none runs, and stop it at the end unless it has other work. Raises
    LauncherError."""
    own = None
    address = launcher_address.address_from_environment() or launcher_address.read_address(runs)
    try:
        if address is None:
            if not start:
                raise LauncherError(f"no launcher is running for {runs}")
            own = await _spawn_launcher(runs)
            address = await interrupts.unless_interrupted(_wait_until_serving(runs, own))
        async with rpc.channel(
            address.address, token=address.token, tls=address.tls, peer=LAUNCHER
        ) as channel:
            stub: Any = RunServiceStub(channel)
            connection = LauncherConnection(runs, stub, address, own)
            may_stay = True
            try:
                yield connection
            except (InterruptedByUserError, LauncherGoneError, UnwrittenEndError):
                may_stay = False
                raise
            finally:
                # A refused command must not end the runs that its launcher has taken over.
                if own and may_stay and await _has_other_work(connection):
                    own = None
    finally:
        if own is not None:
            await _stop_launcher(own, interrupts)


def open_launcher_log(runs: Path) -> BinaryIO:
    """Open the log of the folder's launcher to append to it; create the folder. Raises OSError."""
    runs.mkdir(parents=True, exist_ok=True)
    return (runs / LAUNCHER_LOG).open("ab")


async def _spawn_launcher(runs: Path) -> asyncio.subprocess.Process:
    """Start a launcher in its own session, so that a Ctrl-C in this terminal does not reach
    it."""
    options = ("--runs", str(runs), "--idle-exit", str(_IDLE_EXIT_S))
    with open_launcher_log(runs) as log:
        return await asyncio.create_subprocess_exec(
            *python_command("-m", "flotilla_launcher", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


async def _wait_until_serving(runs: Path, own: asyncio.subprocess.Process) -> LauncherAddress:
    """Wait until a launcher serves and return its address: that of `own`, or of another one
    that started first."""
    log = runs / LAUNCHER_LOG
    for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
        address = launcher_address.read_address(runs)
        if address is not None:
            return address
        if own.returncode is not None and own.returncode < 0:
            number = signal.Signals(-own.returncode).name
            raise LauncherGoneError(f"the launcher was killed by {number} at startup; see {log}")
        if own.returncode is not None and own.returncode != 0:
            raise LauncherError(
                f"the launcher did not start:\n{read_last_lines(log)}{_describe_full_disk(runs)}"
            )
        await asyncio.sleep(_POLL_S)
    raise LauncherError(f"the launcher did not answer within {_START_TIMEOUT_S:g} s; see {log}")


def _describe_full_disk(runs: Path) -> str:
    """Describe a disk on which the launcher can write nothing, not even its log; else empty."""
    if shutil.disk_usage(runs).free >= _LEAST_ROOM_BYTES:
        return ""
    return f"the disk of {runs} is full: make room, and repeat the command"


async def _has_other_work(connection: LauncherConnection) -> bool:
    """Return whether the launcher has active runs, or suspected remains of a run to search for.
    Once it has neither, it exits on its own."""
    request = pb.ListRunsRequest()
    try:
        while True:
            call = connection.stub.ListRuns(request, timeout=_PROBE_S)
            answer = await connection.await_answer(call)
            if not answer.more or any(needs_launcher(run) for run in answer.runs):
                return any(needs_launcher(run) for run in answer.runs)
            request.after_run_id = answer.runs[-1].run_id
    except (grpc.aio.AioRpcError, LauncherGoneError):
        # It is gone or stuck: stopping it is right either way.
        return False


def needs_launcher(run: pb.Run) -> bool:
    """Return whether the run's launcher must keep running."""
    if run.state not in (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED):
        return True
    recent = time.time() < run.end_time.seconds + SUSPECTED_FOR_S
    return run.cleanup == pb.CLEANUP_LEAK_SUSPECTED and recent


async def _stop_launcher(own: asyncio.subprocess.Process, interrupts: Interrupts) -> None:
    """Stop the launcher by SIGTERM, which drains its runs; on a second Ctrl-C send another
    SIGTERM, which ends them at once."""
    with suppress(ProcessLookupError):
        own.terminate()
    if await run_unless(interrupts.second, own.wait()) is None:
        with suppress(ProcessLookupError):
            os.kill(own.pid, signal.SIGTERM)
        await own.wait()
