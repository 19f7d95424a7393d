"""Start of a run, and following it to its end across reconnects and launcher deaths."""

import json
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.aio.concurrency import running_tasks, wait_beside
from flotilla_common.rpc.rpc import service_error
from flotilla_launcher.cli.inspector_process import linked_inspector
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.launcher_client import (
    TRANSIENT_CODES,
    LauncherConnection,
    LauncherError,
    LauncherGoneError,
    ReconnectDeadline,
    UnwrittenEndError,
    connect_to_launcher,
    start_run,
)
from flotilla_launcher.cli.progress_view import ProgressView, open_view
from flotilla_launcher.cli.run_view import RunBoard
from flotilla_launcher.cli.stop_on_interrupt import cancel_request, stop_on_interrupt
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.control.spec_changes import diff_specs
from flotilla_launcher.store.ledger import Ledger

# Limit of one stream of events. If a launcher dies while a stream opens, gRPC waits that long; the
# death of a local one is known sooner, and another takes over.
_WATCH_S, _WATCH_HERE_S = 15.0, 2.0
_CALL_S = 30.0
# Launcher deaths before one command gives up: something else must be wrong.
_MAX_LAUNCHERS = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FollowOutcome:
    """Result of following a run; `run` is None if it never began."""

    run: pb.Run | None
    interrupted: bool
    seconds: float


@dataclass(slots=True)
class FollowedRun:
    """A run as far as it was followed, under any number of launchers."""

    since: int
    run_id: str = ""
    last_event: int = 0
    # What the launcher cannot write down, and has said so.
    unwritten: str = ""
    # A launcher that this command does not own has cancelled the start; `cancelled` is the run that
    # it had begun.
    start_cancelled: bool = False
    cancelled: pb.Run | None = None
    board: RunBoard = field(default_factory=RunBoard)

    def take_number(self, event: pb.WatchRunResponse) -> bool:
        """Note an event's number; return False for what every stream repeats until the launcher can
        write it down."""
        if event.event == self.last_event and event.message:
            known, self.unwritten = self.unwritten, event.message
            return known != self.unwritten
        if event.event > self.last_event:
            self.unwritten = ""
        self.last_event = event.event
        return True


async def with_successors(
    open_launcher: Callable[[], AbstractAsyncContextManager[LauncherConnection]],
    work: Callable[[LauncherConnection], Awaitable[T]],
    show_line: Callable[[str], object],
) -> T:
    """Call `work` with a launcher, and again with the next one each time that one dies. Raises
    LauncherError."""
    for _ in range(_MAX_LAUNCHERS - 1):
        try:
            async with open_launcher() as connection:
                return await work(connection)
        except LauncherGoneError:
            show_line("The launcher has died; another one takes over.")
    async with open_launcher() as connection:
        return await work(connection)


async def run_to_end(
    runs: Path,
    request: pb.StartRunRequest,
    console: Terminal,
    interrupts: Interrupts,
    *,
    detach: bool = False,
    leaves: bool = False,
) -> FollowOutcome:
    """Start the requested run and watch it to its end, or with `detach` only start it; if its
    launcher dies, continue under another one. A user who `leaves` on an interrupt does not stop it.
    Raises LauncherError, AioRpcError."""
    began, followed = time.monotonic(), FollowedRun(int(time.time()))
    request.request_id = request.request_id or uuid.uuid4().hex

    async def start_and_leave(connection: LauncherConnection) -> pb.Run | None:
        if not followed.run_id:
            try:
                starting = _start_or_resume(connection, request)
                followed.run_id = await interrupts.unless_interrupted(starting)
            except InterruptedByUserError:
                cancel = connection.cancel_command(request.request_id)
                console.print(
                    f"interrupted, and the run may have begun: {cancel} makes sure it ends",
                    soft_wrap=True,
                )
                return None
            console.print(f"Run {followed.run_id}", soft_wrap=True)
        if not detach:
            with open_view(console) as view:
                if await watch_until_left(connection, followed, view, interrupts):
                    return await connection.get_run(followed.run_id, _CALL_S)
        return pb.Run(run_id=followed.run_id, state=pb.RUN_STATE_RUNNING)

    async def start_and_follow(connection: LauncherConnection) -> pb.Run | None:
        if not followed.run_id:
            run_id = await _begin_run(connection, request, followed, console, interrupts)
            followed.run_id = run_id
            console.print(f"Run {run_id} in {runs / run_id}", soft_wrap=True)
        try:
            if not detach:
                async with linked_inspector(runs, followed.run_id, console):
                    await _follow_run(connection, followed, console, interrupts)
            return await connection.get_run(followed.run_id)
        except grpc.aio.AioRpcError as error:
            known = service_error(error)
            if known is not None and known.reason == "UNKNOWN_RUN":
                # It was stopped in the queue, and is forgotten.
                return None
            raise

    run: pb.Run | None
    try:
        run = await with_successors(
            lambda: connect_to_launcher(runs, interrupts, start=True),
            start_and_leave if leaves else start_and_follow,
            console.print,
        )
    except InterruptedByUserError:
        # The launcher may have begun the run before the interrupt reached it.
        started_here = not followed.start_cancelled
        run = _find_begun_run(runs, request.request_id) if started_here else followed.cancelled
    return FollowOutcome(run, interrupts.first.is_set(), time.monotonic() - began)


async def _begin_run(
    connection: LauncherConnection,
    request: pb.StartRunRequest,
    followed: FollowedRun,
    console: Terminal,
    interrupts: Interrupts,
) -> str:
    """Start the run. On an interrupt, a launcher that this command owns exits with it and ends
    the run; any other launcher cancels the request. The queue outlives every launcher, so a request
    that waits is cancelled in any case."""
    try:
        return await interrupts.unless_interrupted(_start_or_resume(connection, request))
    except InterruptedByUserError:
        if connection.own is None or request.wait:
            console.print("Cancelling the start of the run. Ctrl-C again stops waiting.")
            cancel = cancel_request(connection, request.request_id, interrupts)
            followed.cancelled = await cancel
            followed.start_cancelled = True
        raise


async def _start_or_resume(connection: LauncherConnection, request: pb.StartRunRequest) -> str:
    """Start or resume the run; one that is already active with the requested spec is only
    followed."""
    try:
        return await start_run(connection, request)
    except grpc.aio.AioRpcError as error:
        known = service_error(error)
        if known is None or known.reason != "RUN_ACTIVE":
            raise
        if not await _has_spec(connection, request):
            raise
        return request.resume_run_id


async def _has_spec(connection: LauncherConnection, request: pb.StartRunRequest) -> bool:
    """Return whether the run to resume has the requested spec, if there is one."""
    if not request.spec_json:
        return True
    run = await connection.get_run(request.resume_run_id)
    return not diff_specs(json.loads(run.spec_json), json.loads(request.spec_json))


def _find_begun_run(runs: Path, request_id: str) -> pb.Run | None:
    store = Ledger(runs / "launcher.sqlite")
    known = store.get_request(request_id)
    store.close()
    return None if known is None else pb.Run(run_id=known[1], state=pb.RUN_STATE_STOPPED)


async def _follow_run(
    connection: LauncherConnection, followed: FollowedRun, console: Terminal, interrupts: Interrupts
) -> None:
    with open_view(console) as view:
        async with running_tasks(
            watch_to_end(connection, followed, view, interrupts),
            stop_on_interrupt(connection, followed.run_id, view, interrupts),
        ) as (watching, stopping):
            await wait_beside(watching, [stopping])


async def watch_until_left(
    connection: LauncherConnection,
    followed: FollowedRun,
    view: ProgressView,
    interrupts: Interrupts,
) -> bool:
    """Follow the run; return True at its end, False if the user has left. A launcher that this
    command started keeps running. Raises LauncherError, AioRpcError."""
    try:
        await interrupts.unless_interrupted(watch_to_end(connection, followed, view, interrupts))
    except InterruptedByUserError:
        return False
    return True


async def watch_to_end(
    connection: LauncherConnection,
    followed: FollowedRun,
    view: ProgressView,
    interrupts: Interrupts,
) -> None:
    """Process events until the run has ended, over as many streams as needed. Raises
    LauncherError, AioRpcError if its end cannot be observed.

    The server closes the stream of an ended run, so an end in the past does not count."""
    board, patience = followed.board, ReconnectDeadline(connection)
    watch_s = _WATCH_S if connection.address.elsewhere else _WATCH_HERE_S
    while True:
        request = pb.WatchRunRequest(run_id=followed.run_id, after_event=followed.last_event)
        try:
            async for event in connection.stub.WatchRun(request, timeout=watch_s):
                if not followed.take_number(event):
                    continue
                line = board.take_event(event)
                # A resumed run replays its past events first.
                if event.time.seconds >= followed.since:
                    if line:
                        view.show_line(line)
                    view.show_board(board)
        except grpc.aio.AioRpcError as error:
            if error.code() not in TRANSIENT_CODES:
                raise
            if not connection.is_alive():
                raise connection.make_gone_error() from error
            # No local file shows whether a remote launcher is gone: it is retried for a while, or
            # until the user interrupts again.
            if connection.address.elsewhere:
                if interrupts.second.is_set() and not await connection.is_answering():
                    message = "the launcher does not answer; its runs may continue without it"
                    raise LauncherError(message) from error
                await patience.retry_after_cut(error)
        if board.has_ended:
            return
        if followed.unwritten and interrupts.second.is_set():
            raise UnwrittenEndError(
                f"{followed.unwritten}. The end of the run is not written down: the next launcher"
                " of this folder takes the run up again"
            )
