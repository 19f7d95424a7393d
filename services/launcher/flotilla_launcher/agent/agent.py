"""Watcher of one replica: joins the pure state machine, the replica's process and the launcher."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import cancel_tasks, wait_for_event
from flotilla_common.telemetry import log
from flotilla_launcher.agent import decisions as watches
from flotilla_launcher.agent.decisions import (
    EndCause,
    ProcessAction,
    WatchStage,
    WatchState,
)
from flotilla_launcher.agent.log_uploader import LogUploader
from flotilla_launcher.agent.ports import (
    LauncherAwayError,
    LauncherLink,
    PollNotice,
    ReplicaReplacedError,
)
from flotilla_launcher.agent.run_folder import NotResumableError, StoreAwayError
from flotilla_launcher.agent_protocol import ReplicaCommand, UnitReport
from flotilla_launcher.backends.ports import Backend, BackendError, LaunchSpec
from flotilla_launcher.state import EXIT_BAD_CONFIG, ExitStatus, Unit

_REPORT_S = 5.0
_CALL_S = 5.0
_NOTICE_S = 2.0
# Share of a notice's time that is kept for the log and the last report.
_MARGIN_S = 2.0
# Time for the log and the last report if the machine is not taken away.
_FAREWELL_S = 30.0
_AGAIN_S = 0.5
# Time left after a notice without a time (a hook's file, a scheduler's SIGTERM): a little less than
# the 30 s before Slurm (KillWait) and Kubernetes kill by default.
DEFAULT_LEFT_S = 25.0
_EXIT_RETRYABLE = 3
_log = log.get_logger(__name__)

# Makes the machine ready; its argument is True if the run has trained.
Prepare = Callable[[bool], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class WatcherDependencies:
    """Everything a watcher works with."""

    launch: LaunchSpec
    processes: Backend
    launcher: LauncherLink
    notices: Sequence[PollNotice]
    uploader: LogUploader
    prepare: Prepare
    hostname: str
    # True if the run is known to have begun before the launcher answers.
    resume: bool = False


class Watcher:
    """Watcher of one replica from the machine's first minute to its last, on one event loop."""

    def __init__(self, watch: WatchState, parts: WatcherDependencies) -> None:
        self._watch = watch
        self._parts = parts
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unit: Unit | None = None
        self._preparing: list[asyncio.Task[None]] = []
        self._sees = BackgroundTasks()

    async def watch_to_end(self) -> ExitStatus:
        """Return the final exit once the replica and all its children are gone."""
        background = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("report", self._keep_reporting()),
                ("notices", self._poll_notices()),
                ("log", self._parts.uploader.upload_logs()),
            )
        ]
        for task in background:
            task.add_done_callback(self._check_task)
        self._begin_preparing()
        try:
            await self._keep_replica()
        finally:
            await cancel_tasks([*background, *self._preparing])
        await self._send_farewell()
        return self._watch.verdict

    def drain_replica(self, cause: EndCause, grace_s: float | None = None) -> None:
        """Drain the replica within the grace."""
        longest_s = self._watch.drain_s
        grace_s = longest_s if grace_s is None else min(grace_s, longest_s)
        if self._watch.stage is not WatchStage.DRAINING:
            _log.warning("draining", cause=cause.value, grace_s=grace_s)
        self._change_state(watches.request_end(self._watch, cause, time.monotonic(), grace_s))

    def lose_machine(self, left_s: float) -> None:
        """Drain the replica and report its end before the machine is gone."""
        self.drain_replica(EndCause.PREEMPTED, max(0.0, left_s - _MARGIN_S))

    def end_now(self) -> None:
        """End the replica now."""
        self._change_state(watches.request_end(self._watch, EndCause.ASKED, time.monotonic(), 0.0))

    def _change_state(self, watch: WatchState) -> None:
        self._set_state(watch)
        self._wake.set()

    def _set_state(self, watch: WatchState) -> None:
        before, self._watch = self._watch, watch
        if (before.phase, before.restarts) != (watch.phase, watch.restarts):
            self._news.set()

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """Drain if a background task failed: a defect there must not leave the replica
        unwatched."""
        if not task.cancelled() and task.exception() is not None:
            _log.error("the watcher failed", task=task.get_name(), exc_info=task.exception())
            self.drain_replica(EndCause.SILENCE)

    async def _keep_replica(self) -> None:
        while self._watch.stage is not WatchStage.OVER:
            self._wake.clear()
            before = self._watch.cause
            watch, action = watches.decide_action(self._watch, time.monotonic())
            self._set_state(watch)
            if self._watch.cause is not before:
                _log.error("the launcher is silent", lease_s=self._watch.lease_s)
            await self._perform_action(action)
            await self._sleep_until_due()

    async def _sleep_until_due(self) -> None:
        due = watches.next_due(self._watch)
        await wait_for_event(self._wake, None if due is None else max(0.0, due - time.monotonic()))

    async def _perform_action(self, action: ProcessAction | None) -> None:
        processes = self._parts.processes
        if action is ProcessAction.START:
            await self._start_process()
        elif action is ProcessAction.DRAIN and self._unit is not None:
            await processes.drain_replica(self._unit)
        elif action is ProcessAction.KILL and self._unit is not None:
            await processes.kill_replica(self._unit)

    async def _start_process(self) -> None:
        try:
            self._unit = await self._parts.processes.start_replica(self._parts.launch)
        except BackendError as error:
            # A retry would fail too: the machine lacks the command.
            return self._handle_exit(ExitStatus(EXIT_BAD_CONFIG, str(error)))
        self._sees.start_task(self._wait_for_process(self._unit))
        self._wake.set()

    async def _wait_for_process(self, unit: Unit) -> None:
        how = await self._parts.processes.wait_for_exit(unit)
        self._unit = None
        self._handle_exit(how)

    def _handle_exit(self, how: ExitStatus) -> None:
        self._change_state(watches.record_exit(self._watch, how))
        if self._watch.stage is WatchStage.WAITING:
            _log.warning("it has ended; the launcher decides what follows", code=how.code)

    def _start_again(self) -> None:
        """Obey the launcher's command to start a process that has ended."""
        self._change_state(watches.grant_start(self._watch))
        if self._watch.stage is WatchStage.PREPARING:
            self._begin_preparing()

    def _begin_preparing(self) -> None:
        task = asyncio.create_task(self._prepare_machine(), name="prepare")
        task.add_done_callback(self._check_task)
        self._preparing = [task]

    async def _prepare_machine(self) -> None:
        begun = await self._answered or self._parts.resume
        try:
            await self._parts.prepare(begun)
        except NotResumableError as error:
            return self._give_up_setup(ExitStatus(EXIT_BAD_CONFIG, str(error)))
        except StoreAwayError as error:
            return self._give_up_setup(ExitStatus(_EXIT_RETRYABLE, str(error)))
        self._change_state(watches.mark_prepared(self._watch))

    def _give_up_setup(self, how: ExitStatus) -> None:
        _log.error("the replica cannot be started here", why=how.tail)
        with self._parts.uploader.log.open("a", encoding="utf-8") as file:
            file.write(f"error: {how.tail}\n")
        self._change_state(watches.mark_unprepared(self._watch, how))

    async def _poll_notices(self) -> None:
        while True:
            for poll_notice in self._parts.notices:
                if (left_s := await poll_notice()) is not None:
                    return self.lose_machine(left_s)
            await asyncio.sleep(_NOTICE_S)

    async def _keep_reporting(self) -> None:
        """Report each change at once, and often enough for the lease."""
        while True:
            self._news.clear()
            again_s = min(_REPORT_S, self._watch.lease_s / 5)
            if not await self._send_report(min(_CALL_S, self._watch.lease_s / 2)):
                await asyncio.sleep(min(again_s, _AGAIN_S))
                continue
            await wait_for_event(self._news, again_s)

    async def _send_report(self, timeout_s: float) -> bool:
        """Report the unit's state and follow the answer; return False if there was none."""
        sent_at = time.monotonic()
        try:
            answer = await self._parts.launcher.report_unit(self._make_report(), timeout_s)
        except LauncherAwayError as error:
            _log.warning("the launcher is away", why=str(error))
            return False
        except ReplicaReplacedError as error:
            _log.warning("another machine has this replica", why=str(error))
            self.drain_replica(EndCause.ASKED, watches.STOP_GRACE_S)
            return True
        self._change_state(watches.renew_lease(self._watch, sent_at, answer.lease_s))
        if not self._answered.done():
            self._answered.set_result(answer.begun)
        match answer.command:
            case ReplicaCommand.START:
                self._start_again()
            case ReplicaCommand.DRAIN:
                self.drain_replica(EndCause.ASKED)
            case ReplicaCommand.STOP:
                self.drain_replica(EndCause.ASKED, watches.STOP_GRACE_S)
            case ReplicaCommand.NONE:
                pass
        return True

    def _make_report(self) -> UnitReport:
        watch = self._watch
        ended = watch.stage in (WatchStage.WAITING, WatchStage.OVER)
        how = watch.verdict if ended else None
        return UnitReport(watch.phase, how, self._parts.hostname, watch.restarts)

    async def _send_farewell(self) -> None:
        """Push the rest of the log and report the exit. Give up soon if the machine or the
        launcher is going away."""
        limit_s = {EndCause.SILENCE: 1.0, EndCause.PREEMPTED: _MARGIN_S}.get(
            self._watch.cause or EndCause.ASKED, _FAREWELL_S
        )
        deadline = time.monotonic() + limit_s
        if not await self._parts.uploader.flush(limit_s):
            _log.warning("the rest of the log stays here", path=str(self._parts.uploader.log))
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._send_last_report(min(_CALL_S, limit_s))

    async def _send_last_report(self, timeout_s: float) -> None:
        while True:
            if await self._send_report(timeout_s):
                return
            await asyncio.sleep(_AGAIN_S)
