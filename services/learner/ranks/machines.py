"""The further machines of a learner, as the learner sees them. Everything is on one event loop."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.log import get_logger
from services.learner.ports import RankError
from services.learner.ranks.machine_admission import Machine
from services.learner.ranks.pending_calls import Answer, Calls, failed

if TYPE_CHECKING:
    from services.learner.ranks import protocol

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A command for one rank of a machine."""

    call: int
    rank: int
    command: str
    arguments: Mapping[str, Any]


class Over:
    """The learner has ended in order."""


class Session:
    """One machine for as long as its stream holds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._calls = Calls()
        self._says: asyncio.Queue[Call | Over | None] = asyncio.Queue()
        # Why there is nobody any more.
        self._lost: str | None = None

    @property
    def name(self) -> str:
        return f"machine {self.machine.number} ({self.machine.hostname})"

    async def next(self) -> Call | Over | None:
        """What the machine is to be told next; None when its stream is to end."""
        return await self._says.get()

    def send(self, rank: int, command: str, arguments: Mapping[str, Any]) -> Answer:
        """See `RankHandle`."""
        if self._lost is not None:
            return failed(self._lost)
        call, answer = self._calls.begin(command)
        self._says.put_nowait(Call(call, rank, command, arguments))
        return answer

    def succeed(self, call: int, result: "protocol.Message") -> None:
        """A rank has answered. Raises KeyError for what was not asked."""
        self._calls.succeed(call, result)

    def fail(self, call: int, problem: str, *, rank_ended: bool) -> None:
        """A rank has failed. Raises KeyError for what was not asked."""
        if rank_ended:
            self._lost = self._lost or f"{self.name}: {problem}"
        self._calls.fail(call, f"{self.name}: {problem}")

    def lost(self, why: str) -> None:
        """Its ranks are gone, or will be."""
        if self._lost is None:
            self._lost = f"{self.name} {why}"
        self._calls.fail_all(self._lost)
        self._says.put_nowait(None)

    @property
    def ended(self) -> bool:
        """Whether one of its ranks, or all of it, is gone."""
        return self._lost is not None

    def over(self) -> None:
        """Tell it that it is not needed any more."""
        self._says.put_nowait(Over())
        self.lost("was sent home")


class RemoteRank:
    """One rank of a machine. Implements `rank.calls.RankHandle`."""

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self._rank = rank

    @property
    def ended(self) -> bool:
        """See `RankHandle`."""
        return self._session.ended

    def send(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        """See `RankHandle`."""
        return self._session.send(self._rank, command, arguments)

    def kill(self) -> None:
        """All of the machine's ranks end with its stream."""
        self._session.lost("was given up")

    async def close(self) -> None:
        """See `RankHandle`."""
        self.kill()


class Roll:
    """Which machines have joined, of those that `own`, the learner's, is one of."""

    def __init__(self, own: Machine) -> None:
        self._own = own
        self._sessions: dict[int, Session] = {}
        self._joined = asyncio.Event()

    @property
    def others(self) -> int:
        """How many machines there are besides the learner's."""
        return len(self._wanted)

    def admit(self, machine: Machine) -> Session:
        """The machine takes part from the next start of the ranks on.

        Raises WrongMachineError.
        """
        self._own.check(machine)
        known = self._sessions.get(machine.number)
        if known is not None:
            known.lost("has joined again")
        session = self._sessions[machine.number] = Session(machine)
        self._joined.set()
        _log.info("a machine has joined", machine=machine.number, hostname=machine.hostname)
        return session

    def left(self, session: Session, why: str) -> None:
        """Its stream has ended."""
        if not session.ended:
            _log.warning("a machine is lost", machine=session.machine.number, why=why)
        session.lost(why)
        if self._sessions.get(session.machine.number) is session:
            del self._sessions[session.machine.number]

    async def complete(self, limit_s: float) -> Sequence[Session]:
        """All further machines in order, once they are there.

        Raises RankError that names those which are not there in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self._missing:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            missing = ", ".join(map(str, self._missing))
            raise RankError(
                f"machine {missing} of {self._own.machines} has not joined in {limit_s:g} s: run"
                " `python -m services.learner.ranks --replica NUMBER` with this spec there, see"
                " its log, or set learner.rank.nodes = 1"
            ) from None
        return [self._sessions[number] for number in self._wanted]

    def close(self, *, over: bool) -> None:
        """End all streams; `over` when the learner will not come back."""
        for session in list(self._sessions.values()):
            if over:
                session.over()
            else:
                session.lost("has lost its learner")
        self._sessions.clear()

    @property
    def _wanted(self) -> range:
        return range(1, self._own.machines)

    @property
    def _missing(self) -> list[int]:
        return [number for number in self._wanted if number not in self._sessions]


@contextmanager
def dismissed(roll: Roll | None) -> Generator[None]:
    """Sends all machines home when the block ends well, else has them join the next learner."""
    over = False
    try:
        yield
        over = True
    finally:
        if roll is not None:
            roll.close(over=over)
