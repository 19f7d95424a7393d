"""Start of a run, and following it to its end despite reconnects and launcher deaths."""

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc import service_error
from services.launcher.cli.inspector_process import linked_inspector
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    TRANSIENT_CODES,
    LauncherConnection,
    LauncherError,
    LauncherGoneError,
    ReconnectDeadline,
    connect_to_launcher,
    start_run,
)
from services.launcher.cli.progress_view import ProgressView, open_view
from services.launcher.cli.run_view import RunBoard
from services.launcher.cli.stop_on_interrupt import cancel_request, stop_on_interrupt
from services.launcher.cli.terminal import Terminal
from services.launcher.control.spec_changes import diff_specs
from services.launcher.store.ledger import Ledger

# Longest stream of events. gRPC waits this long for a launcher that dies while a stream begins; the
# death of a local launcher is detected soon, and another one takes over.
_WATCH_S, _WATCH_HERE_S = 15.0, 2.0
# Launcher deaths before one command gives up: something else must be wrong.
MAX_LAUNCHERS = 5


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request to start a run. `spec_json` may be empty if `resume` names a run. With `detach` the
    run is started but not followed."""

    spec_json: str
    mode: "pb.RunMode.ValueType"
    resume: str = ""
    detach: bool = False


@dataclass(frozen=True, slots=True)
class FollowOutcome:
    """Result of following a run; `run` is None if it never began."""

    run: pb.Run | None
    interrupted: bool
    seconds: float


@dataclass(slots=True)
class FollowedRun:
    """Followed part of a run, across all its launchers."""

    since: int
    run_id: str = ""
    last_event: int = 0
    # After an interrupted start at a launcher of another command: its answer to the cancellation.
    cancel_answered: bool = False
    cancelled: pb.Run | None = None
    board: RunBoard = field(default_factory=RunBoard)


async def run_to_end(
    runs: Path, run_request: RunRequest, console: Terminal, interrupts: Interrupts
) -> FollowOutcome:
    """Start the requested run and follow it to its end; if its launcher dies, continue with
    another one. Raises LauncherError, AioRpcError."""
    began, followed = time.monotonic(), FollowedRun(int(time.time()))
    request_id = uuid.uuid4().hex
    run: pb.Run | None = None
    try:
        for _ in range(MAX_LAUNCHERS):
            try:
                run = await _run_under_one_launcher(
                    runs, run_request, request_id, followed, console, interrupts
                )
                break
            except LauncherGoneError:
                console.print("The launcher has died; another one takes over.")
        else:
            message = f"{MAX_LAUNCHERS} launchers died one after another; see {runs}/launcher.log"
            raise LauncherError(message)
    except InterruptedByUserError:
        # The launcher may have begun the run before the cancellation reached it.
        run = followed.cancelled if followed.cancel_answered else _find_begun_run(runs, request_id)
    return FollowOutcome(run, interrupts.first.is_set(), time.monotonic() - began)


async def _run_under_one_launcher(
    runs: Path,
    run_request: RunRequest,
    request_id: str,
    followed: FollowedRun,
    console: Terminal,
    interrupts: Interrupts,
) -> pb.Run:
    async with connect_to_launcher(runs, interrupts, start=True) as connection:
        if not followed.run_id:
            began = _begin_run(connection, run_request, request_id, followed, console, interrupts)
            run_id = followed.run_id = await began
            console.print(f"Run {run_id} in {runs / run_id}", soft_wrap=True)
        if not run_request.detach:
            async with linked_inspector(runs, followed.run_id, console):
                await _follow_run(connection, followed, console, interrupts)
        request = pb.GetRunRequest(run_id=followed.run_id)
        return (await connection.await_answer(connection.stub.GetRun(request))).run


async def _begin_run(
    connection: LauncherConnection,
    run_request: RunRequest,
    request_id: str,
    followed: FollowedRun,
    console: Terminal,
    interrupts: Interrupts,
) -> str:
    """Start the run. On an interrupt, a launcher that this command owns exits with it and ends
    the run; any other launcher gets a cancellation of the request."""
    try:
        return await interrupts.unless_interrupted(
            _start_or_resume(connection, run_request, request_id)
        )
    except InterruptedByUserError:
        if connection.own is None:
            console.print("Cancelling the start of the run. Ctrl-C again stops waiting.")
            followed.cancelled = await cancel_request(connection, request_id, interrupts)
            followed.cancel_answered = True
        raise


async def _start_or_resume(
    connection: LauncherConnection, run_request: RunRequest, request_id: str
) -> str:
    """Start or resume the run and return its id. If it is already active with the requested spec,
    only return its id."""
    try:
        return await start_run(connection, _to_start_request(run_request, request_id))
    except grpc.aio.AioRpcError as error:
        known = service_error(error)
        if known is None or known.reason != "RUN_ACTIVE":
            raise
        if not await _has_spec(connection, run_request):
            raise
        return run_request.resume


async def _has_spec(connection: LauncherConnection, run_request: RunRequest) -> bool:
    """Return whether the run to resume has the requested spec, if one is given."""
    if not run_request.spec_json:
        return True
    request = pb.GetRunRequest(run_id=run_request.resume)
    run = (await connection.await_answer(connection.stub.GetRun(request))).run
    return not diff_specs(json.loads(run.spec_json), json.loads(run_request.spec_json))


def _to_start_request(run_request: RunRequest, request_id: str) -> pb.StartRunRequest:
    return pb.StartRunRequest(
        request_id=request_id,
        spec_json=run_request.spec_json,
        mode=run_request.mode,
        resume_run_id=run_request.resume,
    )


def _find_begun_run(runs: Path, request_id: str) -> pb.Run | None:
    store = Ledger(runs / "launcher.sqlite")
    known = store.get_request(request_id)
    store.close()
    return None if known is None else pb.Run(run_id=known[1], state=pb.RUN_STATE_STOPPED)


async def _follow_run(
    connection: LauncherConnection, followed: FollowedRun, console: Terminal, interrupts: Interrupts
) -> None:
    run_id = followed.run_id
    async with asyncio.TaskGroup() as tasks:
        with open_view(console) as view:
            stopping = tasks.create_task(stop_on_interrupt(connection, run_id, view, interrupts))
            try:
                problem = await watch_to_end(connection, followed, view, interrupts)
            finally:
                stopping.cancel()
    # Raised outside of the task group, which would wrap it into an exception group.
    if problem is not None:
        raise problem


def _show_event(view: ProgressView, board: RunBoard, line: str) -> None:
    if line:
        view.show_line(line)
    view.show_board(board)


async def watch_to_end(
    connection: LauncherConnection,
    followed: FollowedRun,
    view: ProgressView,
    interrupts: Interrupts,
) -> Exception | None:
    """Process events until the run has ended, over as many streams as needed. Return an error
    if its end cannot be observed because the launcher is gone.

    A resumed run first replays its past, so only the close of the stream proves its end."""
    board, patience = followed.board, ReconnectDeadline(connection)
    watch_s = _WATCH_S if connection.address.elsewhere else _WATCH_HERE_S
    while True:
        request = pb.WatchRunRequest(run_id=followed.run_id, after_event=followed.last_event)
        try:
            async for event in connection.stub.WatchRun(request, timeout=watch_s):
                followed.last_event = event.event
                line = board.take_event(event)
                # A resumed run replays its past events first.
                if event.time.seconds >= followed.since:
                    _show_event(view, board, line)
        except grpc.aio.AioRpcError as error:
            if error.code() not in TRANSIENT_CODES:
                return error
            if not connection.is_alive():
                return connection.make_gone_error()
            if connection.address.elsewhere:
                problem = await _await_remote_launcher(connection, patience, interrupts, error)
                if problem is not None:
                    return problem
        if board.has_ended:
            return None


async def _await_remote_launcher(
    connection: LauncherConnection,
    patience: ReconnectDeadline,
    interrupts: Interrupts,
    error: grpc.aio.AioRpcError,
) -> LauncherError | None:
    """Wait for a remote launcher. No local file shows its death, so it is retried for a while,
    or until the user interrupts again."""
    if await connection.is_answering():
        patience.note_answer()
        return None
    if interrupts.second.is_set():
        return LauncherError("the launcher does not answer; its runs may continue without it")
    try:
        await patience.wait_before_retry(error)
    except LauncherError as gone:
        return gone
    return None
