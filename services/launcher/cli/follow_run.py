"""Start of a run, and following it to its end across reconnects and launcher deaths."""

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

# Of one stream of events. gRPC waits that long for a launcher that dies as a stream begins: of one
# here it is soon known that it is dead, and another takes over.
_WATCH_S, _WATCH_HERE_S = 15.0, 2.0
# Launchers that may die under one command before something else must be wrong.
MAX_LAUNCHERS = 5


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to start. `spec_json` may be empty when `resume` names a run. With `detach` the run
    is started but not followed."""

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
    """A run as far as it was followed, under whichever launcher."""

    since: int
    run_id: str = ""
    last_event: int = 0
    # What a launcher that is not ours said of the run when its start was interrupted.
    asked: bool = False
    cancelled: pb.Run | None = None
    board: RunBoard = field(default_factory=RunBoard)


async def run_to_end(
    runs: Path, run_request: RunRequest, console: Terminal, interrupts: Interrupts
) -> FollowOutcome:
    """Start the requested run and watch it to its end; if its launcher dies, continue under
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
            message = f"{MAX_LAUNCHERS} launchers died one after the other; see {runs}/launcher.log"
            raise LauncherError(message)
    except InterruptedByUserError:
        # The launcher may have begun the run before it learnt that nobody wants it any more.
        run = followed.cancelled if followed.asked else _find_begun_run(runs, request_id)
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
    what it began; any other launcher is asked to cancel the request."""
    try:
        return await interrupts.unless_interrupted(
            _start_or_resume(connection, run_request, request_id)
        )
    except InterruptedByUserError:
        if connection.own is None:
            console.print("Stopping what may have begun. Ctrl-C again stops waiting.")
            followed.cancelled = await cancel_request(connection, request_id, interrupts)
            followed.asked = True
        raise


async def _start_or_resume(
    connection: LauncherConnection, run_request: RunRequest, request_id: str
) -> str:
    """Start or resume the run; one that is already active under a launcher, with the spec that is
    asked for, is only followed."""
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
    """Return whether the run to resume has the spec that is asked for, if any is."""
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
    # Not before: it would come out of the group as part of one.
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

    The server closes the stream of an ended run, so an end in the past does not count."""
    board, patience = followed.board, ReconnectDeadline(connection)
    watch_s = _WATCH_S if connection.address.elsewhere else _WATCH_HERE_S
    while True:
        request = pb.WatchRunRequest(run_id=followed.run_id, after_event=followed.last_event)
        try:
            async for event in connection.stub.WatchRun(request, timeout=watch_s):
                followed.last_event = event.event
                line = board.take_event(event)
                # A resumed run tells its past first.
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
    """Wait for a remote launcher. No file here tells when it is gone: it is retried for a
    while, or until the user interrupts again."""
    if await connection.is_answering():
        patience.note_answer()
        return None
    if interrupts.second.is_set():
        return LauncherError("the launcher does not answer; its runs are not ended by that")
    try:
        await patience.wait_before_retry(error)
    except LauncherError as gone:
        return gone
    return None
