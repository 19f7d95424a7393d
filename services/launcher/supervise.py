"""Keeps one run as it is wanted: the pure state machine, its ledger and a backend, in a loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common import log
from services.launcher import runs
from services.launcher.config import LauncherConfig
from services.launcher.decide import decide, next_due
from services.launcher.plan import log_path, replica_command
from services.launcher.ports import Backend, BackendError, Launch, UnitReport
from services.launcher.registry import Member, Roster
from services.launcher.runs import Action, Drain, Exit, Key, Kill, Note, Replica, Run, Start, Unit
from services.launcher.store import Store
from services.launcher.units import Units, news

TOKEN_VARIABLE = "FLOTILLA_TOKEN"
# Progress is worth an event when it is news, or when it is this old.
_PROGRESS_S = 0.9
_LOOK_AROUND_S = 5.0
_log = log.get_logger(__name__)


class Command(StrEnum):
    """What the answer to a heartbeat tells a replica."""

    NONE = "none"
    DRAIN = "drain"
    STOP = "stop"


class UnregisteredError(Exception):
    """A heartbeat of a replica that has not registered."""


class Signal:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Take this *before* looking, then wait for it: no change is missed."""
        return self._event


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the learner says the run has come."""

    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def body(self) -> dict[str, Any]:
        head = {"phase": self.phase, "step": self.step, "total_steps": self.total_steps}
        return {**head, "metrics": dict(self.metrics)}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run is kept with."""

    backend: Backend
    store: Store
    run_dir: Path
    registry: str
    token: str


class Supervisor:
    """One run from its start to its end. Everything happens on one event loop."""

    def __init__(self, run: Run, config: LauncherConfig, around: Surroundings) -> None:
        self.run = run
        self.config = config
        self.roster = Roster()
        self.units = Units()
        self.progress = Progress()
        self.changed = Signal()
        self._around = around
        self._policy = config.policy()
        self._wake = asyncio.Event()
        self._progress_at = 0.0
        self._silent: set[Key] = set()

    async def supervise(self) -> None:
        """Act on what is wanted until the run has ended and nothing of it runs."""
        async with asyncio.TaskGroup() as tasks:
            while not self.run.state.ended:
                self._wake.clear()
                run, actions = decide(self.run, _now(), self._policy)
                if run.state.ended:
                    await self._around.backend.clean(run.run_id)
                self._commit(run, [a for a in actions if isinstance(a, Note)])
                for action in actions:
                    self._act(action, tasks)
                self._report_silence()
                await self._sleep()

    async def _sleep(self) -> None:
        now = _now()
        due = next_due(self.run, now)
        patience = _LOOK_AROUND_S if due is None else min(_LOOK_AROUND_S, due - now)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), patience)

    def _act(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(key):
                tasks.create_task(self._run_unit(key))
            case Drain(key):
                tasks.create_task(self._with_unit(key, self._around.backend.drain))
            case Kill(key):
                tasks.create_task(self._with_unit(key, self._around.backend.kill))
            case Note():
                return

    async def _with_unit(self, key: Key, do: Callable[[Unit], Awaitable[None]]) -> None:
        unit = self.run.replicas[key].unit
        if unit is not None:
            await do(unit)

    async def _run_unit(self, key: Key) -> None:
        """Start one process and see it through to its end."""
        backend = self._around.backend
        try:
            unit = await backend.start(self._launch(key))
        except BackendError as error:
            # Asking again changes nothing: the machine lacks what the spec wants.
            return self._note_exit(key, Exit(runs.EXIT_BAD_CONFIG, str(error)))
        self._commit(runs.started(self.run, key, unit))
        if self.run.replicas[key].state is runs.ReplicaState.DRAINING:
            await backend.drain(unit)
        self._note_exit(key, await backend.wait(unit))

    def _launch(self, key: Key) -> Launch:
        around = self._around
        command = replica_command(
            self.config.modules, key, around.run_dir, around.registry, self.run.mode
        )
        return Launch(
            run_id=self.run.run_id,
            key=key,
            command=command,
            secrets={TOKEN_VARIABLE: around.token},
            log=log_path(around.run_dir, key),
            gpus=self.config.gpus()[key[0]],
        )

    def _note_exit(self, key: Key, how: Exit) -> None:
        self.roster.forget(key)
        self.units.forget(key)
        self._silent.discard(key)
        run, notes = runs.exited(self.run, key, how, _now(), self._policy)
        self._commit(run, notes)

    def register(self, member: Member) -> None:
        """Take a replica into the roster. Raises ReplacedError."""
        self.roster.register(member)
        self._commit(runs.registered(self.run, member.key, member.address))

    def beat(self, key: Key, incarnation: str, serving: bool, progress: Progress) -> Command:
        """Note a heartbeat, answer with a command. Raises ReplacedError, UnregisteredError."""
        command = self._command(key)
        listed = serving and command is Command.NONE
        version = self.roster.version
        if not self.roster.beat(key, incarnation, listed, _now()):
            raise UnregisteredError(key)
        self._silent.discard(key)
        if self.roster.version != version:
            self.changed.notify()
        self._commit(runs.beat(self.run, key, progress.phase, serving))
        if key[0] == runs.LEARNER:
            self._note_progress(progress)
        return command

    def report(self, key: Key, incarnation: str, report: UnitReport) -> Command:
        """Note what a watcher says, answer with a command. Raises ReplacedError."""
        before = self.units.take(key, incarnation, report)
        if text := news(key, before, report):
            self._commit(self.run, [Note(text)])
        self._wake.set()
        return self._command(key)

    def has_trained(self) -> bool:
        """Whether the run must never begin anew: its learner has told of a step."""
        return self._around.store.has_trained(self.run.run_id)

    def _command(self, key: Key) -> Command:
        replica = self.run.replicas.get(key)
        if self.run.state.ended:
            return Command.STOP
        if replica is None:
            # Somebody started it by hand to help; it goes when the run goes.
            draining = self.run.state is runs.RunState.DRAINING
            return Command.DRAIN if draining else Command.NONE
        if replica.state is not runs.ReplicaState.DRAINING:
            return Command.NONE
        return Command.STOP if _now() >= replica.due else Command.DRAIN

    def scale(self, service: str, replicas: int) -> None:
        self._commit(runs.scale(self.run, service, replicas), [Note(f"{service}={replicas}")])

    def stop(self, grace_s: float) -> None:
        """Drain and end the run; a repeat can only shorten the grace."""
        self._commit(runs.stop(self.run, _now(), grace_s))

    async def ended(self) -> None:
        """Return when the run has ended."""
        while True:
            change = self.changed.next
            if self.run.state.ended:
                return
            await change.wait()

    def _note_progress(self, progress: Progress) -> None:
        known, self.progress = self.progress, progress
        news = (known.phase, known.step) != (progress.phase, progress.step)
        if not news and (progress == known or _now() - self._progress_at < _PROGRESS_S):
            return
        self._progress_at = _now()
        store, run_id = self._around.store, self.run.run_id
        with store.transaction():
            store.save_metrics(run_id, progress.metrics)
            store.add_event(run_id, time.time(), "progress", progress.body())
        self.changed.notify()

    def _report_silence(self) -> None:
        silent = self.roster.silent(_now(), self.config.silent_after_s)
        for member in silent:
            if member.key in self._silent:
                continue
            self._silent.add(member.key)
            name = f"{member.service}-{member.replica}"
            quiet = f"{name} has sent no heartbeat for {self.config.silent_after_s:g} s"
            self._commit(self.run, [Note(f"{quiet}; its process is still there")])

    def _commit(self, run: Run, notes: list[Note] | None = None) -> None:
        """Make `run` the truth: ledger first, then whoever watches."""
        before, self.run = self.run, run
        changed = [r for r in run.replicas.values() if before.replicas.get(r.key) != r]
        moved = before.state is not run.state
        if not (changed or moved or notes or before.wanted != run.wanted):
            return
        self._write(before, changed, moved, notes or [])
        self._wake.set()
        self.changed.notify()

    def _write(self, before: Run, changed: list[Replica], moved: bool, notes: list[Note]) -> None:
        store, run, now = self._around.store, self.run, time.time()
        with store.transaction():
            store.save(run, changed, now if run.state.ended else None)
            for replica in changed:
                if _shown(before.replicas.get(replica.key)) != _shown(replica):
                    store.add_event(run.run_id, now, "replica", replica_body(replica))
            for note in notes:
                store.add_event(run.run_id, now, "message", {"text": note.text})
            if moved:
                store.add_event(run.run_id, now, "state", {"state": run.state})
        for note in notes:
            _log.info("run", run_id=run.run_id, note=note.text)
        if moved:
            _log.info("run state", run_id=run.run_id, state=run.state.value)


def replica_body(replica: Replica) -> dict[str, Any]:
    """What an event says about a replica."""
    return {
        "service": replica.service,
        "replica": replica.index,
        "state": replica.state,
        "phase": replica.phase,
        "address": replica.address,
        "restarts": replica.restarts,
        "pid": replica.unit.pid if replica.unit else 0,
    }


def _shown(replica: Replica | None) -> dict[str, Any] | None:
    """What of a replica makes an event when it changes: its phase alone does not."""
    return None if replica is None else {**replica_body(replica), "phase": ""}


def _now() -> float:
    return time.monotonic()
