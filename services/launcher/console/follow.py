"""Starts a run and stays with it until it has ended, whatever happens to the connection."""

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from rich.console import Console

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc import duration
from services.launcher.console.board import Board
from services.launcher.console.connection import Connection, LauncherError, connected
from services.launcher.console.interrupts import InterruptedByUserError, Interrupts
from services.launcher.console.views import View, viewing
from services.launcher.store import Store

_WATCH_S = 15.0
_STOP_GRACE_S = 30.0
_START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What to start. `spec_json` may be empty when `resume` names a run."""

    spec_json: str
    mode: "pb.RunMode.ValueType"
    resume: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended; `run` is None if it never began."""

    run: pb.Run | None
    interrupted: bool
    seconds: float


async def run_to_end(runs: Path, wish: Wish, console: Console, interrupts: Interrupts) -> Outcome:
    """Start what is wished and watch it to its end. Raises LauncherError, AioRpcError."""
    began, since = time.monotonic(), int(time.time())
    request_id = uuid.uuid4().hex
    run: pb.Run | None = None
    try:
        async with connected(runs, interrupts, start=True) as connection:
            run_id = await interrupts.unless(_start(connection, wish, request_id))
            console.print(f"Run {run_id} in {runs / run_id}", highlight=False, soft_wrap=True)
            await _follow(connection, run_id, since, console, interrupts)
            answer = await connection.stub.GetRun(pb.GetRunRequest(run_id=run_id))
            run = answer.run
    except InterruptedByUserError:
        # The launcher may have begun the run before it learnt that nobody wants it any more.
        run = _begun(runs, request_id)
    return Outcome(run, interrupts.first.is_set(), time.monotonic() - began)


async def _start(connection: Connection, wish: Wish, request_id: str) -> str:
    request = pb.StartRunRequest(
        request_id=request_id,
        spec_json=wish.spec_json,
        mode=wish.mode,
        resume_run_id=wish.resume,
    )
    return (await connection.stub.StartRun(request, timeout=_START_TIMEOUT_S)).run_id


def _begun(runs: Path, request_id: str) -> pb.Run | None:
    store = Store(runs / "launcher.sqlite")
    known = store.request(request_id)
    store.close()
    return None if known is None else pb.Run(run_id=known[1], state=pb.RUN_STATE_STOPPED)


async def _follow(
    connection: Connection, run_id: str, since: int, console: Console, interrupts: Interrupts
) -> None:
    async with asyncio.TaskGroup() as tasks:
        with viewing(console) as view:
            stopping = tasks.create_task(_stop_on_interrupt(connection, run_id, view, interrupts))
            await _watch(connection, run_id, since, view)
            stopping.cancel()


def _show(view: View, board: Board, line: str) -> None:
    if line:
        view.line(line)
    view.update(board)


async def _watch(connection: Connection, run_id: str, since: int, view: View) -> None:
    """Take events until the run has ended, over as many streams as that takes.

    The server ends the stream of an ended run, so an end in the past does not count.
    """
    board = Board()
    last = 0
    while not board.ended:
        request = pb.WatchRunRequest(run_id=run_id, after_event=last)
        try:
            async for event in connection.stub.WatchRun(request, timeout=_WATCH_S):
                last = event.event
                line = board.take(event)
                # A resumed run tells its past first.
                if event.time.seconds >= since:
                    _show(view, board, line)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.CANCELLED,
            ):
                raise
            if not connection.alive():
                message = "the launcher is gone; its services drain by themselves"
                raise LauncherError(message) from error


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
    with suppress(grpc.aio.AioRpcError):
        await connection.stub.StopRun(request, timeout=grace_s + 60.0)
