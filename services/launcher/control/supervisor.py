"""Keeps one run as it is wanted: the pure state machine, its ledger and a backend, in a loop."""

import asyncio
import sqlite3
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common import log
from services.launcher import clock, state
from services.launcher.config.launcher import LauncherConfig
from services.launcher.control import ledger_writer, transitions
from services.launcher.control.agent_reports import EXIT_PREEMPTED, Units, news, node_key
from services.launcher.control.cost_meter import Metering
from services.launcher.control.launch_spec import launch_of
from services.launcher.control.prepare_commands import prepare_run
from services.launcher.control.reconcile import command_of, decide, next_due
from services.launcher.control.recover_from_folder import JOURNAL
from services.launcher.control.replica_actions import Carrier, Means
from services.launcher.ports import (
    NO_HOOKS,
    Backend,
    Hooks,
    Intent,
    Launch,
    RefusedError,
    Registry,
    UnitReport,
)
from services.launcher.progress import Progress, RaisedAlarms, Signal
from services.launcher.state import (
    Action,
    Clean,
    Drain,
    Exit,
    Key,
    Kill,
    Note,
    Run,
    RunState,
    Start,
)
from services.launcher.store.ledger import Store, StoredRun
from services.launcher.store.roster import Command, Member, Roster, UnregisteredError

# Progress is worth an event when it is news, or when it is this old.
_PROGRESS_S = 0.9
_LOOK_AROUND_S = 5.0
_WRITE_AGAIN_S = 1.0
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run is kept with."""

    backend: Backend
    store: Store
    run_dir: Path
    registry: Registry
    hooks: Hooks = NO_HOOKS


class Supervisor:
    """One run from its start, or from where another launcher died, to its end.

    Everything happens on one event loop.
    """

    def __init__(self, stored: StoredRun, config: LauncherConfig, around: Surroundings) -> None:
        self.run = stored.run
        self.config = config
        self.roster = Roster()
        self.units = Units()
        told = (stored.step, stored.total_steps, stored.metrics, stored.alarms)
        self.progress = Progress("", *told)
        self._alarms = RaisedAlarms(stored.alarms)
        self.changed = Signal()
        self._spec_json = stored.spec_json
        self._around = around
        self._policy = config.policy()
        limit = config.sky.provision.timeout_s if config.backend == "sky" else None
        means = Means(around.backend, around.store, self._policy, limit)
        self._carrier = Carrier(self, means)
        self._scribe = ledger_writer.Scribe(around.store, stored.run)
        self._metering = Metering(around.hooks.meter, config, stored.prices, stored.begun)
        self._wake = asyncio.Event()
        self._progress_at = 0.0
        self._silent: set[Key] = set()
        # Replicas on machines whose price nobody has asked for.
        self._moved: set[Key] = set()
        self._carried: set[asyncio.Task[None]] = set()

    async def supervise(self) -> None:
        """Act on what is wanted until the run has ended and nothing of it runs."""
        await self._preflight()
        if self.run.state is RunState.TEARDOWN:
            # While no launcher was there nobody looked for remains.
            run = transitions.torn_down(self.run, clock.now(), self._policy)
            self.commit(run, cause="another launcher looks")
        self.run = transitions.taken_over(self.run, clock.now(), self.config.silent_after_s)
        async with asyncio.TaskGroup() as tasks:
            for replica in self.run.replicas.values():
                if not replica.state.over and replica.state is not state.ReplicaState.RESTARTING:
                    self._carry(tasks, self._carrier.take_over(replica.key))
            while not self.run.state.ended:
                self._wake.clear()
                run, actions = decide(self.run, clock.now(), self._policy)
                if self._commit(run, actions):
                    for action in actions:
                        await self._act(action, tasks)
                else:
                    # What it costs meanwhile is counted all the same.
                    self._commit(self.run, [])
                while self._moved:
                    self._carry(tasks, self._carrier.price(self._moved.pop()))
                self._report_silence()
                await self._sleep()
            for carried in self._carried:
                # A replica whose end nobody has told of is waited for no longer.
                carried.cancel()
        while self.behind:
            await asyncio.sleep(_WRITE_AGAIN_S)
            self._commit(self.run, [])

    @property
    def behind(self) -> bool:
        """Whether the ledger lacks something of the run."""
        return self._scribe.behind

    def _carry(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.create_task(work)
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _preflight(self) -> None:
        """Prepare the run and ask whether it may start; a stop meanwhile is not kept waiting."""
        if self.run.state is not RunState.PREFLIGHT:
            return
        asking = asyncio.create_task(self._ask_gate())
        try:
            while not asking.done() and self.run.state is RunState.PREFLIGHT:
                change = asyncio.create_task(self.changed.next.wait())
                await asyncio.wait({asking, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            asking.cancel()
            # With it ends what it had started.
            await asyncio.wait({asking})
        if self.run.state is not RunState.PREFLIGHT:
            return
        try:
            asking.result()
        except RefusedError as error:
            run = transitions.end(
                self.run, state.Outcome.REFUSED, clock.now(), self._policy, str(error)
            )
            # Whoever follows the run is told of it with its end, which comes at once.
            _log.warning("refused", run_id=self.run.run_id, why=str(error))
            self.commit(run, cause="refused before the start")
        else:
            self.commit(transitions.passed(self.run), cause="preflight passed")

    async def _ask_gate(self) -> None:
        launches = tuple(self.launch((service, 0)) for service in self.run.wanted)
        run_dir, gate = self._around.run_dir, self._around.hooks.gate
        intent = Intent(self.run, run_dir, self._spec_json, self.config, launches)
        await prepare_run(intent, lambda text: self.commit(self.run, [Note(text)]))
        if gate is not None and (told := await gate(intent)):
            self.commit(self.run, [Note(text) for text in told])

    async def _sleep(self) -> None:
        now = clock.now()
        dues = [next_due(self.run, now), self._metering.next_due(self.run)]
        patience = min([_LOOK_AROUND_S, *(due - now for due in dues if due is not None)])
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._wake.wait()

    async def _act(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(key):
                self._carry(tasks, self._carrier.start(key))
            case Drain(key):
                self._carry(tasks, self._carrier.drain(key))
            case Kill(key):
                self._carry(tasks, self._carrier.kill(key))
            case Clean():
                await self._carrier.clean()
            case Note():
                return

    def launch(self, key: Key) -> Launch:
        around = self._around
        return launch_of(
            self.run, key, self.config, self._spec_json, around.run_dir, around.registry
        )

    def gone(self, key: Key, how: Exit) -> None:
        """A replica has ended; its watcher knows more of that than its backend."""
        last = self.units.last(key)
        # What was said of a machine of before is no word on one that was never ready.
        if last is not None and last.exit is not None and not how.unready:
            preempted = last.exit.code == EXIT_PREEMPTED
            how = Exit(last.exit.code, last.exit.tail or how.tail, preempted)
        self.roster.forget(key)
        self.units.forget(key)
        self._silent.discard(key)
        self._alarms.gone(key)
        self._note_progress(self.progress)
        run, notes = transitions.exited(self.run, key, how, clock.now(), self._policy)
        self.commit(
            run, notes, cause=how.tail if how.code is None else transitions.describe_exit(how)
        )

    def register(self, member: Member) -> None:
        """Take a replica into the roster. Raises ReplacedError."""
        self.roster.register(member)
        run = transitions.registered(self.run, member.key, member.address, member.metrics_address)
        self.commit(run, cause="registered")

    def beat(self, key: Key, incarnation: str, serving: bool, progress: Progress) -> Command:
        """Note a heartbeat, answer with a command. Raises ReplacedError, UnregisteredError."""
        command = command_of(self.run, key, clock.now())
        listed = serving and command is Command.NONE
        version = self.roster.version
        if not self.roster.beat(key, incarnation, listed, clock.now()):
            raise UnregisteredError(key)
        self._silent.discard(key)
        if self.roster.version != version:
            self.changed.notify()
        self.commit(transitions.beat(self.run, key, progress.phase, serving), cause="it serves")
        self._alarms.told(key, progress.alarms, self.progress.step)
        if key[0] == state.LEARNER:
            self._note_progress(progress.after(self.progress))
        else:
            self._note_progress(self.progress)
        return command

    def report(self, key: Key, incarnation: str, report: UnitReport, node: int = 0) -> Command:
        """Note what a watcher says, answer with a command. Raises ReplacedError."""
        speaker = node_key(key, node)
        before = self.units.take(speaker, incarnation, report)
        # Only the first machine of a replica speaks for it.
        over = report.exit is not None and node == 0
        if before is None and node == 0 and key in self.run.replicas:
            self._moved.add(key)
        run = transitions.reported_exit(self.run, key) if over else self.run
        text = news(speaker, before, report)
        self.commit(run, [Note(text)] if text else [])
        self._wake.set()
        return command_of(self.run, key, clock.now())

    def has_trained(self) -> bool:
        """Whether the run must never begin anew: its learner has told of a step, or was here."""
        around = self._around
        here = (around.run_dir / JOURNAL).exists()
        return here or around.store.has_trained(self.run.run_id)

    def scale(self, service: str, replicas: int) -> None:
        run = transitions.scale(self.run, service, replicas)
        self.commit(run, [Note(f"{service}={replicas}")], cause=f"scaled to {replicas}")

    def stop(self, grace_s: float) -> None:
        """Drain and end the run; a repeat can only shorten the grace."""
        self.commit(transitions.stop(self.run, clock.now(), grace_s), cause="asked to stop")

    def hurry(self) -> None:
        """End the run at once: the launcher must go."""
        self.commit(transitions.hurried(self.run, clock.now()), cause="the launcher must go")

    async def ended(self) -> None:
        """Return when the run has ended."""
        while True:
            change = self.changed.next
            if self.run.state.ended:
                return
            await change.wait()

    def _note_progress(self, progress: Progress) -> None:
        known = self.progress
        progress = self.progress = replace(progress, alarms=self._alarms.all)
        news = _news(known) != _news(progress)
        if not news and (progress == known or clock.now() - self._progress_at < _PROGRESS_S):
            return
        now = self._progress_at = clock.now()
        try:
            ledger_writer.write_progress(self._around.store, self.run.run_id, known, progress, now)
        except sqlite3.Error as error:
            # The next is written with all that this one said.
            self.progress = known
            _log.error("progress cannot be written", run_id=self.run.run_id, error=str(error))
        else:
            self.changed.notify()

    def _report_silence(self) -> None:
        silent = self.roster.silent(clock.now(), self.config.silent_after_s)
        for member in silent:
            if member.key in self._silent:
                continue
            self._silent.add(member.key)
            name = f"{member.service}-{member.replica}"
            quiet = f"{name} has sent no heartbeat for {self.config.silent_after_s:g} s"
            self.commit(self.run, [Note(f"{quiet}; its backend has not said that it ended")])

    def commit(self, run: Run, notes: list[Note] | None = None, *, cause: str = "") -> None:
        """Make `run` the truth: ledger first, then whoever watches."""
        self._commit(run, [*(notes or [])], cause)

    def _commit(self, run: Run, actions: list[Action] | list[Note], cause: str = "") -> bool:
        """False, and nothing has changed: what is to be started could not be written down."""
        notes = [action for action in actions if isinstance(action, Note)]
        starts = [action.key for action in actions if isinstance(action, Start)]
        run, notes = self._counted(run, notes)
        before = self.run
        if before == run and not notes and not self.behind:
            return True
        written = self._scribe.write(run, notes, cause, starts)
        if not written and starts:
            return False
        self.run = run
        # What changes nothing but could not be written wakes nobody, or they would ask at once.
        if written or run != before:
            self._wake.set()
            self.changed.notify()
        return True

    def _counted(self, run: Run, notes: list[Note]) -> tuple[Run, list[Note]]:
        """The run with what it has cost by now; what costs too much is drained."""
        now = clock.now()
        run, verdict = self._metering.count(self.run, run, now)
        if verdict is None:
            return run, notes
        if verdict.stop is not None:
            run = transitions.end(run, verdict.stop, now, self._policy, verdict.note)
        return run, [*notes, Note(verdict.note)] if verdict.note else notes


def _news(progress: Progress) -> tuple[Any, ...]:
    """What nobody should wait for."""
    return (progress.phase, progress.step, progress.alarms)
