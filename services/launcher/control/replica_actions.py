"""Carries out, replica by replica, what was decided: start or take over, follow, drain, kill.

A backend that cannot be asked is asked again, as long as it takes; meanwhile nothing is concluded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.common import log
from services.launcher import clock
from services.launcher.control import transitions
from services.launcher.control.backend_requests import Intents, label
from services.launcher.ports import (
    Backend,
    BackendError,
    BackendUnreachable,
    CapacityError,
    Launch,
    SetupError,
    StartLostError,
)
from services.launcher.state import (
    EXIT_BAD_CONFIG,
    Exit,
    Key,
    Note,
    Policy,
    ReplicaState,
    Run,
    Unit,
)
from services.launcher.store.ledger import Store
from services.launcher.store.operations import OperationState

T = TypeVar("T")

# Between two attempts to reach a backend: at first, and at last.
_ASK_AGAIN_S, _ASK_AGAIN_MAX_S = 0.5, 15.0
_log = log.get_logger(__name__)


class Book(Protocol):
    """Who knows the run and writes down what becomes of it."""

    run: Run

    def commit(self, run: Run, notes: list[Note] | None = None, *, cause: str = "") -> None: ...

    def launch(self, key: Key) -> Launch: ...

    def gone(self, key: Key, how: Exit) -> None: ...


@dataclass(frozen=True, slots=True)
class Means:
    """With what it is carried out."""

    backend: Backend
    store: Store
    policy: Policy
    # Longest start of a machine; None: the backend answers at once.
    start_limit_s: float | None = None


class Carrier:
    """The replicas of one run."""

    def __init__(self, book: Book, means: Means) -> None:
        self._book = book
        self._means = means
        self._backend = means.backend
        self._intents = Intents(means.store, book.run.run_id)
        # Starts that a drain or a kill may still prevent.
        self._starting: dict[Key, asyncio.Task[Any]] = {}
        # Those that are being killed, or were just now, and how often each was.
        self._killing: set[Unit] = set()
        self._kills: dict[Unit, int] = {}

    async def start(self, key: Key) -> None:
        """Start a replica and see it through to its end."""
        launch = self._book.launch(key)
        start = await self._preventable(key, self._obtain(key, launch))
        await self._see_through(key, launch, start)

    async def _preventable(self, key: Key, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """What came of it; a drain or a kill cancels it."""
        task = asyncio.create_task(work, name=f"start {label(key)}")
        self._starting[key] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._starting[key]
        return task

    async def take_over(self, key: Key) -> None:
        """Go on with a replica where another launcher died."""
        launch, unit = self._book.launch(key), self._book.run.replicas[key].unit
        if unit is None:
            # Whoever started it may be starting it still, which takes as long as it takes.
            looking = self.asked(lambda: self._backend.find(launch))
            look = await self._preventable(key, looking)
            if look.cancelled():
                return await self._prevented(key, launch)
            unit = look.result()
        replica = self._book.run.replicas[key]
        wanted = replica.state is ReplicaState.STARTING and not self._book.run.ending
        if unit is None and wanted:
            return await self.start(key)
        if unit is None:
            return await self._prevented(key, launch)
        if not await self.asked(lambda: self._backend.attach(launch, unit)):
            await self.asked(lambda: self._backend.end(unit, 0.0))
            return await self._lost(key, "it ended while no launcher was there")
        if replica.unit is None:
            await self._note_started(key, unit, "found again")
        if replica.unit is None and replica.state is ReplicaState.DRAINING:
            await self.kill(key)
        await self._follow(key, launch, unit)

    async def drain(self, key: Key) -> None:
        """Ask a replica to end; one that is only being started is not started."""
        replica = self._book.run.replicas[key]
        if key in self._starting:
            # What has registered works, though its backend has not said so yet: it is told there.
            if not replica.address:
                self._starting[key].cancel()
            return
        unit = replica.unit
        if unit is not None:
            await self.asked(lambda: self._backend.drain(unit))

    async def kill(self, key: Key) -> None:
        """End a replica now. Not insisted upon: it is decided again when it was in vain."""
        if key in self._starting:
            self._starting[key].cancel()
            return
        unit = self._book.run.replicas[key].unit
        if unit is None or unit in self._killing:
            return
        self._killing.add(unit)
        try:
            await self._kill(key, unit)
            # A cloud that is away is not asked more and more, which would leave nobody any time.
            number = self._kills[unit] = self._kills.get(unit, 0) + 1
            await asyncio.sleep(min(_ASK_AGAIN_MAX_S, _ASK_AGAIN_S * 2**number))
        finally:
            self._killing.discard(unit)

    async def _kill(self, key: Key, unit: Unit) -> None:
        try:
            await self._backend.kill(unit)
        except BackendUnreachable as error:
            # Of what has ended meanwhile nothing has to be asked.
            if self._book.run.replicas[key].unit == unit:
                self.say_unreachable(str(error))

    async def price(self, key: Key) -> None:
        """Ask what a replica costs on the machines that it has now."""
        launch = self._book.launch(key)
        price = await self.asked(lambda: self._backend.price(launch))
        run, notes = transitions.priced(self._book.run, key, price)
        self._book.commit(run, notes, cause="it has other machines")

    async def clean(self) -> None:
        """Free what is left of the run, and write down what was found."""
        run_id = self._book.run.run_id
        number = await self._intents.begin_clean()
        try:
            evidence = await self._backend.clean(run_id)
        except BackendUnreachable as error:
            gone, detail = False, f"the backend cannot be asked: {error}"
            self.say_unreachable(str(error))
        else:
            gone, detail = evidence.gone, evidence.detail
            self.say_unreachable("")
        await self._intents.conclude(number, gone, detail)
        run, notes = transitions.cleaned(self._book.run, gone, detail, clock.now())
        self._book.commit(run, notes, cause=detail)

    async def asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the backend until it answers."""
        patience = _ASK_AGAIN_S
        while True:
            try:
                answer = await ask()
            except BackendUnreachable as error:
                self.say_unreachable(str(error))
                await asyncio.sleep(patience)
                patience = min(2 * patience, _ASK_AGAIN_MAX_S)
            else:
                self.say_unreachable("")
                return answer

    def say_unreachable(self, why: str) -> None:
        run = self._book.run
        if run.unreachable != why:
            text = f"the backend cannot be asked: {why}" if why else "the backend answers again"
            notes = [Note(text)] if bool(why) != bool(run.unreachable) else []
            self._book.commit(transitions.unreachable(run, why), notes)

    async def _see_through(self, key: Key, launch: Launch, start: asyncio.Task[Unit]) -> None:
        """From what came of a start to the replica's end."""
        try:
            unit = start.result()
        except asyncio.CancelledError:
            await self._prevented(key, launch)
        except CapacityError as error:
            await self._undo(launch)
            await self._failed(key, str(error))
            run, notes = transitions.no_capacity(
                self._book.run, key, str(error), clock.now(), self._means.policy
            )
            self._book.commit(run, notes, cause=str(error))
        except SetupError as error:
            await self._undo(launch)
            await self._failed(key, str(error))
            self._book.gone(key, Exit(1, str(error), unready=True))
        # Of a defect here, such as a file that cannot be read just now, as of one elsewhere.
        except (StartLostError, OSError) as error:
            await self._undo(launch)
            await self._failed(key, str(error))
            self._book.gone(key, Exit(1, str(error), began=False))
        except BackendError as error:
            # Asking again changes nothing: the machine lacks what the spec wants.
            await self._undo(launch)
            await self._failed(key, str(error))
            self._book.gone(key, Exit(EXIT_BAD_CONFIG, str(error), began=False))
        else:
            await self._note_started(key, unit, "started")
            await self._follow(key, launch, unit)

    async def _prevented(self, key: Key, launch: Launch) -> None:
        await self._undo(launch)
        await self._failed(key, "not wanted any more")
        self._book.gone(key, Exit(0))

    async def _undo(self, launch: Launch) -> None:
        """End what a start has left, which the next would stumble over."""
        try:
            await self.asked(lambda: self._backend.undo(launch))
        except BackendError as error:
            # Whoever looks for the run's remains asks again.
            _log.warning("a start was not undone", replica=label(launch.key), error=str(error))

    async def _obtain(self, key: Key, launch: Launch) -> Unit:
        """Ask for the replica until there is an answer. What was not answered may have been heard:
        it is looked for before it is asked again."""
        heard = self._intents.heard(key)

        async def attempt() -> Unit:
            nonlocal heard
            unit = await self._backend.find(launch) if heard else None
            if unit is not None and await self._backend.attach(launch, unit):
                return unit
            await self._intents.mark(key, OperationState.SENT)
            heard = True
            return await self._ask(launch)

        return await self.asked(attempt)

    async def _ask(self, launch: Launch) -> Unit:
        limit = self._means.start_limit_s
        try:
            async with asyncio.timeout(limit):
                return await self._backend.start(launch)
        except TimeoutError as error:
            raise CapacityError(f"no machine after {limit or 0:g} s") from error

    async def _follow(self, key: Key, launch: Launch, unit: Unit) -> None:
        while True:
            try:
                how = await self._backend.wait(unit)
            except BackendUnreachable as error:
                self.say_unreachable(str(error))
                # A wait answers when it is over; this, as soon as anybody answers at all.
                await self.asked(lambda: self._backend.attach(launch, unit))
            else:
                # It answers, whatever else was asked of it in vain.
                self.say_unreachable("")
                return self._book.gone(key, how)

    async def _note_started(self, key: Key, unit: Unit, cause: str) -> None:
        run = transitions.started(self._book.run, key, unit, clock.now(), self._means.policy)
        self._book.commit(run, cause=cause)
        await self._intents.mark(key, OperationState.DONE, unit.name)

    async def _failed(self, key: Key, why: str) -> None:
        await self._intents.mark(key, OperationState.FAILED, why)

    async def _lost(self, key: Key, why: str) -> None:
        await self._failed(key, why)
        _log.info("a replica is gone", replica=label(key), why=why)
        self._book.gone(key, Exit(None, why))
