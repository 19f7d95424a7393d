"""Starts a run and stays with it until it has ended, whatever happens to the connection."""

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc import duration, service_error
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    PASSING,
    Connection,
    LauncherError,
    LauncherGoneError,
    Patience,
    connected,
    start_run,
)
from services.launcher.cli.progress_view import View, viewing
from services.launcher.cli.run_view import Board
from services.launcher.cli.terminal import Terminal
from services.launcher.store.ledger import Store

# Of one stream of events. gRPC waits that long for a launcher that dies as a stream begins: of one
# here it is soon known that it is dead, and another takes over.
_WATCH_S, _WATCH_HERE_S = 15.0, 2.0
_STOP_GRACE_S = 30.0
# What the end of a run may take after its grace.
_STOP_TIMEOUT_S = 180.0
# Launchers that may die under one command before something else must be wrong.
SUCCESSORS = 5


@dataclass(frozen=True, slots=True)
class Wish:
    """What to start. `spec_json` may be empty when `resume` names a run. `detach`: begin it, and do
    not follow it."""

    spec_json: str
    mode: "pb.RunMode.ValueType"
    resume: str = ""
    detach: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended; `run` is None if it never began."""

    run: pb.Run | None
    interrupted: bool
    seconds: float


@dataclass(slots=True)
class Followed:
    """A run as far as it was followed, under whichever launcher."""

    since: int
    run_id: str = ""
    last_event: int = 0
    # What a launcher that is not ours said of the run when its start was interrupted.
    asked: bool = False
    cancelled: pb.Run | None = None
    board: Board = field(default_factory=Board)


async def run_to_end(runs: Path, wish: Wish, console: Terminal, interrupts: Interrupts) -> Outcome:
    """Start what is wished and watch it to its end, under another launcher should one die. Raises
    LauncherError, AioRpcError."""
    began, followed = time.monotonic(), Followed(int(time.time()))
    request_id = uuid.uuid4().hex
    run: pb.Run | None = None
    try:
        for _ in range(SUCCESSORS):
            try:
                run = await _run_under_one(runs, wish, request_id, followed, console, interrupts)
                break
            except LauncherGoneError:
                console.print("The launcher has died; another one takes over.")
        else:
            message = f"{SUCCESSORS} launchers died one after the other; see {runs}/launcher.log"
            raise LauncherError(message)
    except InterruptedByUserError:
        # The launcher may have begun the run before it learnt that nobody wants it any more.
        run = followed.cancelled if followed.asked else _begun(runs, request_id)
    return Outcome(run, interrupts.first.is_set(), time.monotonic() - began)


async def _run_under_one(
    runs: Path,
    wish: Wish,
    request_id: str,
    followed: Followed,
    console: Terminal,
    interrupts: Interrupts,
) -> pb.Run:
    async with connected(runs, interrupts, start=True) as connection:
        if not followed.run_id:
            began = _begin(connection, wish, request_id, followed, console, interrupts)
            run_id = followed.run_id = await began
            console.print(f"Run {run_id} in {runs / run_id}", soft_wrap=True)
        if not wish.detach:
            await _follow(connection, followed, console, interrupts)
        request = pb.GetRunRequest(run_id=followed.run_id)
        return (await connection.ask(connection.stub.GetRun(request))).run


async def _begin(
    connection: Connection,
    wish: Wish,
    request_id: str,
    followed: Followed,
    console: Terminal,
    interrupts: Interrupts,
) -> str:
    """Start the run. A launcher of our own goes when we do, with all that it began; any other is
    asked to cancel what it may have begun."""
    try:
        return await interrupts.unless(_start(connection, wish, request_id))
    except InterruptedByUserError:
        if connection.own is None:
            console.print("Stopping what may have begun. Ctrl-C again stops waiting.")
            followed.cancelled = await _cancel(connection, request_id, interrupts)
            followed.asked = True
        raise


async def _cancel(connection: Connection, request_id: str, interrupts: Interrupts) -> pb.Run | None:
    """The run that had begun and is stopped now; None: none has, and none will. Raises
    LauncherError where nobody knows."""

    async def cancel() -> pb.Run | None:
        request = pb.StopRunRequest(request_id=request_id, grace=duration(_STOP_GRACE_S))
        call = connection.stub.StopRun(request, timeout=_STOP_GRACE_S + _STOP_TIMEOUT_S)
        answer = await connection.ask(call)
        if not answer.run_id:
            return None
        wanted = pb.GetRunRequest(run_id=answer.run_id)
        return (await connection.ask(connection.stub.GetRun(wanted))).run

    try:
        return await interrupts.unless_again(cancel())
    except (InterruptedByUserError, LauncherGoneError, grpc.aio.AioRpcError) as error:
        what = "it is not known whether the run has begun, and it may go on"
        raise LauncherError(f"{what}: {connection.cancelling(request_id)}") from error


async def _start(connection: Connection, wish: Wish, request_id: str) -> str:
    """Start or resume; a run that goes on already under a launcher is only followed."""
    try:
        return await start_run(connection, _request(wish, request_id))
    except grpc.aio.AioRpcError as error:
        known = service_error(error)
        if known is None or known.reason != "RUN_ACTIVE" or wish.spec_json:
            raise
        return wish.resume


def _request(wish: Wish, request_id: str) -> pb.StartRunRequest:
    return pb.StartRunRequest(
        request_id=request_id,
        spec_json=wish.spec_json,
        mode=wish.mode,
        resume_run_id=wish.resume,
    )


def _begun(runs: Path, request_id: str) -> pb.Run | None:
    store = Store(runs / "launcher.sqlite")
    known = store.request(request_id)
    store.close()
    return None if known is None else pb.Run(run_id=known[1], state=pb.RUN_STATE_STOPPED)


async def _follow(
    connection: Connection, followed: Followed, console: Terminal, interrupts: Interrupts
) -> None:
    run_id = followed.run_id
    async with asyncio.TaskGroup() as tasks:
        with viewing(console) as view:
            stopping = tasks.create_task(_stop_on_interrupt(connection, run_id, view, interrupts))
            try:
                problem = await watch_to_end(connection, followed, view, interrupts)
            finally:
                stopping.cancel()
    # Not before: it would come out of the group as part of one.
    if problem is not None:
        raise problem


def _show(view: View, board: Board, line: str) -> None:
    if line:
        view.line(line)
    view.update(board)


async def watch_to_end(
    connection: Connection, followed: Followed, view: View, interrupts: Interrupts
) -> Exception | None:
    """Take events until the run has ended, over as many streams as that takes; or return why that
    is not to be known: the launcher is gone.

    The server ends the stream of an ended run, so an end in the past does not count.
    """
    board, patience = followed.board, Patience(connection)
    watch_s = _WATCH_S if connection.address.elsewhere else _WATCH_HERE_S
    while True:
        request = pb.WatchRunRequest(run_id=followed.run_id, after_event=followed.last_event)
        try:
            async for event in connection.stub.WatchRun(request, timeout=watch_s):
                followed.last_event = event.event
                line = board.take(event)
                # A resumed run tells its past first.
                if event.time.seconds >= followed.since:
                    _show(view, board, line)
        except grpc.aio.AioRpcError as error:
            if error.code() not in PASSING:
                return error
            if not connection.alive():
                return connection.gone()
            if connection.address.elsewhere:
                problem = await _await_elsewhere(connection, patience, interrupts, error)
                if problem is not None:
                    return problem
        if board.ended:
            return None


async def _await_elsewhere(
    connection: Connection,
    patience: Patience,
    interrupts: Interrupts,
    error: grpc.aio.AioRpcError,
) -> LauncherError | None:
    """Of a launcher elsewhere no file says that it is gone: it is asked again for a while, or until
    the user has had enough."""
    if await connection.answers():
        patience.heard()
        return None
    if interrupts.second.is_set():
        return LauncherError("the launcher does not answer; its runs are not ended by that")
    try:
        await patience.pause(error)
    except LauncherError as gone:
        return gone
    return None


async def _stop_on_interrupt(
    connection: Connection, run_id: str, view: View, interrupts: Interrupts
) -> None:
    await interrupts.first.wait()
    view.line("Stopping: services finish what they do and save it. Ctrl-C again stops at once.")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_stop(connection, run_id, _STOP_GRACE_S))
        await interrupts.second.wait()
        view.line("Stopping at once.")
        tasks.create_task(_stop(connection, run_id, 0.0))


async def _stop(connection: Connection, run_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(run_id=run_id, grace=duration(grace_s))
    # Whoever watches the run sees how it ends, and whether the launcher is there at all.
    with suppress(grpc.aio.AioRpcError, LauncherGoneError):
        await connection.ask(connection.stub.StopRun(request, timeout=grace_s + 60.0))
