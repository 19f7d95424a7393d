"""Keeps one replica on this machine: the pure state machine, its process and the launcher."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from services.common import log
from services.launcher.agent import decisions as watches
from services.launcher.agent.decisions import Action, Cause, Ending, Stage, Watch
from services.launcher.agent.log_uploader import Outbox
from services.launcher.agent.ports import (
    Launcher,
    LauncherAwayError,
    Notices,
    Processes,
    ReplacedError,
)
from services.launcher.agent.run_folder import NotResumableError, StoreAwayError
from services.launcher.control.supervisor import Command
from services.launcher.ports import BackendError, Launch, UnitReport
from services.launcher.state import EXIT_BAD_CONFIG, Exit, Unit

_REPORT_S = 5.0
_CALL_S = 5.0
_NOTICE_S = 2.0
# What is kept of a notice's time for the log and the last word.
_MARGIN_S = 2.0
# For the log and the last word, at the end of a machine that is not taken away.
_FAREWELL_S = 30.0
_AGAIN_S = 0.5
_EXIT_RETRYABLE = 3
_log = log.get_logger(__name__)

# Has the machine ready; told whether the run has trained.
Prepare = Callable[[bool], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a watcher works with."""

    launch: Launch
    processes: Processes
    launcher: Launcher
    notices: Notices
    outbox: Outbox
    prepare: Prepare
    hostname: str
    # The run has begun: known before the launcher says so.
    resume: bool = False


class Watcher:
    """One replica from the machine's first minute to its last. Everything is on one event loop."""

    def __init__(self, watch: Watch, parts: Parts) -> None:
        self._watch = watch
        self._parts = parts
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unit: Unit | None = None
        self._sees: set[asyncio.Task[None]] = set()

    async def run(self) -> Ending:
        """Return when the replica, and all it started, are gone for good."""
        background = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("report", self._report_on()),
                ("notices", self._listen()),
                ("log", self._parts.outbox.run()),
                ("prepare", self._prepare()),
            )
        ]
        for task in background:
            task.add_done_callback(self._check)
        try:
            await self._keep()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        await self._farewell()
        return self._watch.verdict

    def drain(self, cause: Cause, grace_s: float | None = None) -> None:
        """End the replica in order, within the grace."""
        policy = self._watch.policy
        grace_s = policy.drain_s if grace_s is None else min(grace_s, policy.drain_s)
        if self._watch.stage is not Stage.DRAINING:
            _log.warning("draining", cause=cause.value, grace_s=grace_s)
        self._change(watches.end(self._watch, cause, time.monotonic(), grace_s))

    def lose_machine(self, left_s: float) -> None:
        """End the replica in order, and have said so before the machine is gone."""
        self.drain(Cause.PREEMPTED, max(0.0, left_s - _MARGIN_S))

    def hurry(self) -> None:
        """End it now."""
        self._change(watches.end(self._watch, Cause.ASKED, time.monotonic(), 0.0))

    def _change(self, watch: Watch) -> None:
        self._put(watch)
        self._wake.set()

    def _put(self, watch: Watch) -> None:
        before, self._watch = self._watch, watch
        if (before.phase, before.restarts) != (watch.phase, watch.restarts):
            self._news.set()

    def _check(self, task: asyncio.Task[None]) -> None:
        """A defect in what goes on beside it must not leave the replica unwatched."""
        if not task.cancelled() and task.exception() is not None:
            _log.error("the watcher failed", task=task.get_name(), exc_info=task.exception())
            self.drain(Cause.SILENCE)

    async def _keep(self) -> None:
        while self._watch.stage is not Stage.OVER:
            self._wake.clear()
            before = self._watch.cause
            watch, action = watches.decide(self._watch, time.monotonic())
            self._put(watch)
            if self._watch.cause is not before:
                _log.error("the launcher is silent", lease_s=self._watch.lease_s)
            await self._act(action)
            await self._sleep()

    async def _sleep(self) -> None:
        due = watches.next_due(self._watch)
        await _wait(self._wake, None if due is None else max(0.0, due - time.monotonic()))

    async def _act(self, action: Action | None) -> None:
        processes = self._parts.processes
        if action is Action.START:
            await self._start()
        elif action is Action.DRAIN and self._unit is not None:
            await processes.drain(self._unit)
        elif action is Action.KILL and self._unit is not None:
            await processes.kill(self._unit)

    async def _start(self) -> None:
        try:
            self._unit = await self._parts.processes.start(self._parts.launch)
        except BackendError as error:
            # Asking again changes nothing: the machine lacks the command.
            return self._end(Ending(EXIT_BAD_CONFIG, str(error)))
        task = asyncio.create_task(self._see_through(self._unit))
        self._sees.add(task)
        task.add_done_callback(self._sees.discard)
        self._wake.set()

    async def _see_through(self, unit: Unit) -> None:
        how = await self._parts.processes.wait(unit)
        self._unit = None
        self._end(Ending(1 if how.code is None else how.code, how.tail))

    def _end(self, how: Ending) -> None:
        self._change(watches.ended(self._watch, how, time.monotonic()))
        if self._watch.stage is Stage.WAITING:
            failures = len(self._watch.failures)
            _log.warning("starting it again", code=how.code, failures=failures)

    async def _prepare(self) -> None:
        begun = await self._answered or self._parts.resume
        try:
            await self._parts.prepare(begun)
        except NotResumableError as error:
            return self._give_up(Ending(EXIT_BAD_CONFIG, str(error)))
        except StoreAwayError as error:
            return self._give_up(Ending(_EXIT_RETRYABLE, str(error)))
        self._change(watches.prepared(self._watch, time.monotonic()))

    def _give_up(self, how: Ending) -> None:
        _log.error("the replica cannot be started here", why=how.tail)
        with self._parts.outbox.log.open("a", encoding="utf-8") as file:
            file.write(f"error: {how.tail}\n")
        self._change(watches.unprepared(self._watch, how))

    async def _listen(self) -> None:
        """Have the replica drain as soon as the machine is known to go."""
        while True:
            left_s = await self._parts.notices.notice()
            if left_s is not None:
                self.lose_machine(left_s)
                return
            await asyncio.sleep(_NOTICE_S)

    async def _report_on(self) -> None:
        """At once when there is news, and often enough for the lease."""
        while True:
            self._news.clear()
            again_s = min(_REPORT_S, self._watch.lease_s / 5)
            if not await self._report(self._call_s()):
                await asyncio.sleep(min(again_s, _AGAIN_S))
                continue
            await _wait(self._news, again_s)

    def _call_s(self) -> float:
        return min(_CALL_S, self._watch.lease_s / 2)

    async def _report(self, timeout_s: float) -> bool:
        """Say how it is, and obey the answer; false if there was none."""
        asked_at = time.monotonic()
        try:
            answer = await self._parts.launcher.report(self._word(), timeout_s)
        except LauncherAwayError as error:
            _log.warning("the launcher is away", why=str(error))
            return False
        except ReplacedError as error:
            _log.warning("another machine has this replica", why=str(error))
            self.drain(Cause.ASKED, watches.STOP_S)
            return True
        self._change(watches.renewed(self._watch, asked_at, answer.lease_s))
        if not self._answered.done():
            self._answered.set_result(answer.begun)
        if answer.command is Command.DRAIN:
            self.drain(Cause.ASKED)
        elif answer.command is Command.STOP:
            self.drain(Cause.ASKED, watches.STOP_S)
        return True

    def _word(self) -> UnitReport:
        watch, parts = self._watch, self._parts
        how = None
        if watch.stage is Stage.OVER:
            how = Exit(watch.verdict.code, watch.verdict.tail)
        return UnitReport(watch.phase, how, parts.hostname, watch.restarts)

    async def _farewell(self) -> None:
        """The rest of the log, and how it ended; not for long where time or launcher is gone."""
        limit_s = {Cause.SILENCE: 1.0, Cause.PREEMPTED: _MARGIN_S}.get(
            self._watch.cause or Cause.ASKED, _FAREWELL_S
        )
        deadline = time.monotonic() + limit_s
        if not await self._parts.outbox.flush(limit_s):
            _log.warning("the rest of the log stays here", path=str(self._parts.outbox.log))
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._last_word(min(_CALL_S, limit_s))

    async def _last_word(self, timeout_s: float) -> None:
        while True:
            if await self._report(timeout_s):
                return
            await asyncio.sleep(_AGAIN_S)


async def _wait(event: asyncio.Event, limit_s: float | None) -> None:
    """Not wait_for: that one loses a cancellation which comes together with the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
