"""Supervision of one run: a loop over its pure state machine, the ledger and a backend."""

import asyncio
import sqlite3
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_common.aio.concurrency import running_tasks, wait_for_any, wait_for_event
from flotilla_common.telemetry import log
from flotilla_launcher import clock, state
from flotilla_launcher.agent_protocol import (
    EXIT_PREEMPTED,
    ReplicaCommand,
    UnitPhase,
    UnitReport,
    key_of_node,
)
from flotilla_launcher.backends.ports import Backend, BackendError, LaunchSpec
from flotilla_launcher.control import ledger_writer, restarts, run_end, transitions
from flotilla_launcher.control.actions import (
    CleanRun,
    DrainReplica,
    KillReplica,
    RunAction,
    RunNote,
    StartReplica,
)
from flotilla_launcher.control.agent_reports import AgentReports, describe_report
from flotilla_launcher.control.cost_tracker import CostTracker
from flotilla_launcher.control.device_claims import make_claim
from flotilla_launcher.control.launch_spec import make_launch_spec
from flotilla_launcher.control.prepare_commands import prepare_run
from flotilla_launcher.control.reconcile import command_for, next_reconcile_due, reconcile_run
from flotilla_launcher.control.replica_actions import ReplicaController
from flotilla_launcher.control.token_counts import note_tokens
from flotilla_launcher.ports import NO_HOOKS, LauncherHooks, PendingRun, Registry, RunRefusedError
from flotilla_launcher.run_progress import Progress, RaisedAlarms
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.state import ExitStatus, ReplicaKey, Run, RunState
from flotilla_launcher.store.ledger import Ledger, StoredRun
from flotilla_launcher.store.roster import Member, Roster, UnregisteredError
from flotilla_launcher.store.run_files import JOURNAL, write_spec

# Least interval between two progress events without urgent news.
_PROGRESS_S = 0.9
_LOOK_AROUND_S = 5.0
_WRITE_AGAIN_S = 1.0
# Interval between two looks at the queue for devices.
_QUEUE_S = 0.5
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisorDependencies:
    """Dependencies of a supervisor."""

    backend: Backend
    store: Ledger
    run_dir: Path
    registry: Registry
    hooks: LauncherHooks = NO_HOOKS


@dataclass(frozen=True, slots=True)
class FurtherMachine:
    """The last end of the process on a further machine of a replica, and when it starts again."""

    ended: str = ""
    failures: tuple[float, ...] = ()
    due: float | None = None


class Supervisor:
    """Supervisor of one run from its start, or from a takeover, to its end.

    Everything happens on one event loop."""

    def __init__(
        self, stored: StoredRun, spec: RunSpec, dependencies: SupervisorDependencies
    ) -> None:
        self.run = stored.run
        self.config = spec.config
        self.roster = Roster()
        self.units = AgentReports()
        known = (stored.step, stored.total_steps, stored.metrics, stored.alarms)
        self.progress = Progress("", *known)
        self._alarms = RaisedAlarms(stored.alarms)
        self.changed = ChangeSignal()
        self._spec = spec
        self._dependencies = dependencies
        self._controller = ReplicaController(self, dependencies.backend, dependencies.store)
        self._ledger_writer = ledger_writer.LedgerWriter(dependencies.store, stored.run)
        self._cost_tracker = CostTracker(
            dependencies.hooks.meter, self.config, stored.prices, stored.begun
        )
        # Tokens that its processes have reported; the ledger has those up to the last count.
        self._tokens = stored.run.tokens
        self._submitted = stored.begun
        # Replicas whose devices were freed while the run continues.
        self._freed: set[ReplicaKey] = set()
        self._wake = asyncio.Event()
        self._progress_at = 0.0
        self._silent: set[ReplicaKey] = set()
        self._further: dict[ReplicaKey, FurtherMachine] = {}
        # Replicas on new machines whose price is not fetched yet.
        self._moved: set[ReplicaKey] = set()
        self._carried: set[asyncio.Task[None]] = set()

    async def supervise_to_end(self) -> None:
        """Reconcile the run until it has ended and none of its replicas runs."""
        await self._pass_queue()
        await self._pass_preflight()
        if self.run.state is RunState.TEARDOWN:
            # Restart the search for remains: without a launcher, its time passed unused.
            run = run_end.begin_teardown(self.run, clock.now(), self.config)
            self.commit_run(run, cause="another launcher looks")
        self.run = transitions.extend_start_deadlines(
            self.run, clock.now(), self.config.silent_after_s
        )
        async with asyncio.TaskGroup() as tasks:
            for replica in self.run.replicas.values():
                idle = replica.state.is_over or replica.state is state.ReplicaState.RESTARTING
                if replica.is_live or not idle:
                    self._spawn_work(tasks, self._controller.take_over_replica(replica.key))
            while not self.run.state.has_ended:
                self._wake.clear()
                run, actions = reconcile_run(self.run, clock.now(), self.config)
                starts = [action.key for action in actions if isinstance(action, StartReplica)]
                if self._try_commit(run, [], starts=starts):
                    for action in actions:
                        await self._perform_action(action, tasks)
                else:
                    # Count the cost nevertheless.
                    self._try_commit(self.run, [])
                await self._free_devices()
                while self._moved:
                    self._spawn_work(tasks, self._controller.update_price(self._moved.pop()))
                self._report_silence()
                await self._sleep_until_due()
            for carried in self._carried:
                # Stop waiting for replicas whose end was never reported.
                carried.cancel()
        while self.is_behind:
            await asyncio.sleep(_WRITE_AGAIN_S)
            self._try_commit(self.run, [])

    @property
    def is_behind(self) -> bool:
        """True if the ledger lacks something of the run."""
        return self._ledger_writer.behind

    @property
    def has_ended_unwritten(self) -> bool:
        """True if the run has ended, and the ledger does not take its end."""
        return self.is_behind and self.run.state.has_ended

    @property
    def is_only_unwritten(self) -> bool:
        """True if no replica is left, and the run goes no further because the ledger cannot be
        written."""
        cannot = self.is_behind or bool(self._dependencies.store.write_problem)
        return cannot and (self.run.state.has_ended or self.run.state is RunState.TEARDOWN)

    def _spawn_work(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.create_task(work)
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _pass_queue(self) -> None:
        """Wait until the run holds its devices; a stop request takes effect meanwhile. A run that
        was taken over waits only if nothing of it was left to hold them."""
        backend = self._dependencies.backend
        while not self.run.is_ending:
            try:
                at = await backend.claim_devices(make_claim(self.run, self.config, self._submitted))
            except BackendError as error:
                run = run_end.end_run(
                    self.run, state.Outcome.REFUSED, clock.now(), self.config, str(error)
                )
                return self.commit_run(run, cause=str(error))
            if at is None:
                return self._leave_queue()
            run, notes = transitions.mark_queued(self.run, at)
            self.commit_run(run, notes, cause=at.reason)
            await wait_for_event(self.changed.next_change, _QUEUE_S)

    def _leave_queue(self) -> None:
        """Begin a run that was waiting; its limits of time count from here."""
        if self.run.state is not RunState.QUEUED:
            return
        now, run_id = clock.now(), self.run.run_id
        write_spec(self._dependencies.run_dir, self._spec.text)
        self._dependencies.store.save_begin(run_id, now)
        self._cost_tracker = replace(self._cost_tracker, begun=now)
        self.commit_run(transitions.leave_queue(self.run, now), cause="it holds its devices")

    async def _free_devices(self) -> None:
        """Free the devices of replicas that were scaled away."""
        for replica in self.run.replicas.values():
            stopped = replica.state is state.ReplicaState.STOPPED and replica.key not in self._freed
            if stopped and not self.run.is_ending:
                self._freed.add(replica.key)
                await self._dependencies.backend.release_devices(self.run.run_id, replica.label)

    async def _pass_preflight(self) -> None:
        """Prepare the run and pass the start gate. A stop request takes effect meanwhile."""
        if self.run.state is not RunState.PREFLIGHT:
            return
        async with running_tasks(self._check_gate(), self._leave_preflight()) as tasks:
            await wait_for_any(tasks)
            gate_check, _ = tasks
        if self.run.state is not RunState.PREFLIGHT:
            return
        try:
            gate_check.result()
        except RunRefusedError as error:
            run = run_end.end_run(
                self.run, state.Outcome.REFUSED, clock.now(), self.config, str(error)
            )
            # No event: the run's end follows at once and carries the error.
            _log.warning("refused", run_id=self.run.run_id, why=str(error))
            self.commit_run(run, cause="refused before the start")
        else:
            self.commit_run(transitions.mark_admitted(self.run), cause="preflight passed")

    async def _leave_preflight(self) -> None:
        while self.run.state is RunState.PREFLIGHT:
            await self.changed.next_change.wait()

    async def _check_gate(self) -> None:
        run_dir, gate = self._dependencies.run_dir, self._dependencies.hooks.gate
        intent = PendingRun(self.run, run_dir, self._spec)
        await prepare_run(intent, lambda text: self.commit_run(self.run, [RunNote(text)]))
        if gate is not None and (texts := await gate(intent)):
            self.commit_run(self.run, [RunNote(text) for text in texts])

    async def _sleep_until_due(self) -> None:
        now = clock.now()
        count_due = self._cost_tracker.next_count_due(self.run, self._tokens)
        dues = [next_reconcile_due(self.run, now), count_due]
        patience = min([_LOOK_AROUND_S, *(due - now for due in dues if due is not None)])
        await wait_for_event(self._wake, patience)

    async def _perform_action(self, action: RunAction, tasks: asyncio.TaskGroup) -> None:
        match action:
            case StartReplica(key):
                self._spawn_work(tasks, self._controller.run_replica(key))
            case DrainReplica(key):
                self._spawn_work(tasks, self._controller.drain_replica(key))
            case KillReplica(key):
                self._spawn_work(tasks, self._controller.kill_replica(key))
            case CleanRun():
                await self._controller.clean_run()

    def launch_spec_for(self, key: ReplicaKey) -> LaunchSpec:
        dependencies = self._dependencies
        return make_launch_spec(
            self.run, key, self._spec, dependencies.run_dir, dependencies.registry
        )

    def record_exit(self, key: ReplicaKey, how: ExitStatus) -> None:
        """Record that a replica has ended, and its machine. Its watcher's last report outweighs its
        backend's."""
        last = self.units.last_report(key)
        # A report about an earlier machine does not apply to one that was never ready.
        final = last is not None and last.phase is UnitPhase.EXITED
        if last is not None and last.exit is not None and final and not how.unready:
            preempted = last.exit.code == EXIT_PREEMPTED
            how = ExitStatus(last.exit.code, last.exit.tail or how.tail, preempted)
        self.units.forget_replica(key)
        self._forget_process(key)
        run, notes = restarts.handle_exit(self.run, key, how, clock.now(), self.config)
        self.commit_run(
            run, notes, cause=how.tail if how.code is None else restarts.describe_exit(how)
        )

    def _forget_process(self, key: ReplicaKey) -> None:
        self.roster.forget_member(key)
        self._silent.discard(key)
        self._alarms.drop_alarms(key)
        self._note_progress(self.progress)

    def register_replica(self, member: Member) -> None:
        """Add a replica to the roster. Raises ReplacedError."""
        self.roster.register_member(member)
        run = transitions.mark_registered(
            self.run, member.key, member.address, member.metrics_address
        )
        self.commit_run(run, cause="registered")

    def record_heartbeat(
        self, key: ReplicaKey, incarnation: str, serving: bool, progress: Progress
    ) -> ReplicaCommand:
        """Record a heartbeat and return a command. Raises ReplacedError, UnregisteredError."""
        command = command_for(self.run, key, clock.now())
        listed = serving and command is ReplicaCommand.NONE
        version = self.roster.version
        if not self.roster.record_heartbeat(key, incarnation, listed, clock.now()):
            raise UnregisteredError(key)
        self._silent.discard(key)
        if self._spec.uses_tinker:
            self._tokens = note_tokens(self._tokens, key[0], incarnation, progress.metrics)
        if self.roster.version != version:
            self.changed.notify_all()
        run = transitions.mark_heartbeat(self.run, key, progress.phase, serving)
        run, notes = transitions.set_tracker_url(run, progress.tracker_url)
        self.commit_run(run, notes, cause="it serves")
        self._alarms.replace_alarms(key, progress.alarms, self.progress.step)
        if key[0] == state.LEARNER:
            self._note_progress(progress.with_metrics_of(self.progress))
        else:
            self._note_progress(self.progress)
        return command

    def record_report(
        self, key: ReplicaKey, incarnation: str, report: UnitReport, node: int = 0
    ) -> ReplicaCommand:
        """Record a watcher's report and return a command. Raises ReplacedError."""
        machine = key_of_node(key, node)
        before = self.units.record_report(machine, incarnation, report)
        # Only the first machine of a replica decides its state.
        over = report.phase is UnitPhase.EXITED and node == 0
        ended = f"{incarnation} {report.restarts}" if report.phase is UnitPhase.WAITING else ""
        if before is None and node == 0 and key in self.run.replicas:
            self._moved.add(key)
        replica = self.run.replicas.get(key)
        if replica is not None and replica.unit is not None:
            self._dependencies.backend.note_report(replica.unit, node, report)
        run = transitions.mark_exit_reported(self.run, key) if over else self.run
        text = describe_report(machine, before, report)
        self.commit_run(run, [RunNote(text)] if text else [])
        if node and report.exit is not None and ended:
            command = command_for(self.run, key, clock.now())
            return self._command_further_machine(machine, ended, report.exit, command)
        if report.exit is not None and ended and key in self.run.replicas:
            run, notes = restarts.handle_process_end(
                self.run, key, ended, report.exit, clock.now(), self.config
            )
            if run != self.run:
                self._forget_process(key)
                self.commit_run(run, notes, cause=restarts.describe_exit(report.exit))
        self._wake.set()
        return command_for(self.run, key, clock.now(), ended)

    def _command_further_machine(
        self, machine: ReplicaKey, ended: str, how: ExitStatus, command: ReplicaCommand
    ) -> ReplicaCommand:
        """Return the command to a further machine whose process has ended: while its replica is
        wanted, it is started again like a replica."""
        if command is not ReplicaCommand.NONE:
            return command
        known = self._further.setdefault(machine, FurtherMachine())
        if known.ended != ended:
            failures, delay = restarts.count_failure(known.failures, how, clock.now(), self.config)
            due = None if delay is None or not how.code else clock.now() + delay
            known = self._further[machine] = FurtherMachine(ended, failures, due)
        if known.due is None:
            return ReplicaCommand.STOP
        return ReplicaCommand.START if clock.now() >= known.due else ReplicaCommand.NONE

    def has_trained(self) -> bool:
        """Return whether the run has trained and must never restart from scratch: its learner
        has reported a step, or left its journal here."""
        dependencies = self._dependencies
        here = (dependencies.run_dir / JOURNAL).exists()
        return here or dependencies.store.has_trained(self.run.run_id)

    def scale_service(self, service: str, replicas: int) -> None:
        run = transitions.scale_service(self.run, service, replicas)
        self.commit_run(run, [RunNote(f"{service}={replicas}")], cause=f"scaled to {replicas}")

    def request_stop(self, grace_s: float, why: str = "stopped on request") -> None:
        """Drain and end the run; a repeat can only shorten the grace."""
        run = run_end.request_stop(self.run, clock.now(), grace_s, why)
        self.commit_run(run, cause=why)

    def end_now(self) -> None:
        """End the run at once because the launcher must exit."""
        self.commit_run(run_end.hurry_run(self.run, clock.now()), cause="the launcher must exit")

    async def wait_until_ended(self) -> None:
        """Return when the run has ended."""
        while True:
            change = self.changed.next_change
            if self.run.state.has_ended:
                return
            await change.wait()

    def _note_progress(self, progress: Progress) -> None:
        known = self.progress
        progress = self.progress = replace(progress, alarms=self._alarms.all_alarms)
        news = _urgent_fields(known) != _urgent_fields(progress)
        if not news and (progress == known or clock.now() - self._progress_at < _PROGRESS_S):
            return
        now = self._progress_at = clock.now()
        try:
            ledger_writer.write_progress(
                self._dependencies.store, self.run.run_id, known, progress, now
            )
        except sqlite3.Error as error:
            # The next write includes this change.
            self.progress = known
            _log.error("cannot write the progress", run_id=self.run.run_id, error=str(error))
        else:
            self.changed.notify_all()

    def _report_silence(self) -> None:
        silent = self.roster.silent_members(clock.now(), self.config.silent_after_s)
        for member in silent:
            if member.key in self._silent:
                continue
            self._silent.add(member.key)
            name = f"{member.service}-{member.replica}"
            quiet = f"{name} has sent no heartbeat for {self.config.silent_after_s:g} s"
            self.commit_run(self.run, [RunNote(f"{quiet}; its backend has not reported its end")])

    def commit_run(self, run: Run, notes: list[RunNote] | None = None, *, cause: str = "") -> None:
        """Replace the run's state: write it to the ledger first, then wake all watchers."""
        self._try_commit(run, notes or [], cause)

    def _try_commit(
        self, run: Run, notes: list[RunNote], cause: str = "", *, starts: Sequence[ReplicaKey] = ()
    ) -> bool:
        """Replace the run's state. Return False if it is unchanged because the starts could
        not be written."""
        run, notes = self._count_cost(run, notes)
        before = self.run
        if before == run and not notes and not self.is_behind:
            return True
        written = self._ledger_writer.write_change(run, notes, cause, starts)
        if not written and starts:
            return False
        self.run = run
        # An unwritten change without effect must not wake watchers: they would spin.
        if written or run != before:
            self._wake.set()
            self.changed.notify_all()
        return True

    def _count_cost(self, run: Run, notes: list[RunNote]) -> tuple[Run, list[RunNote]]:
        """Count the cost of the run up to now; drain a run that has reached a limit."""
        if self.run.state is RunState.QUEUED:
            return run, notes
        now = clock.now()
        run, verdict = self._cost_tracker.count_cost(self.run, run, now, self._tokens)
        if verdict is None:
            return run, notes
        if verdict.stop is not None:
            run = run_end.end_run(run, verdict.stop, now, self.config, verdict.note)
        return run, [*notes, RunNote(verdict.note)] if verdict.note else notes


def _urgent_fields(progress: Progress) -> tuple[Any, ...]:
    """Return the parts of progress that are published at once."""
    return (progress.phase, progress.step, progress.alarms)
