"""The further machines of a learner, as the learner sees them. Everything is on one event loop."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.log import get_logger
from services.learner.ports import RankError
from services.learner.ranks.machine_admission import Machine
from services.learner.ranks.pending_calls import Answer, PendingCalls, failed_answer

if TYPE_CHECKING:
    from services.learner.ranks import protocol

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RankCall:
    """A command for one rank of a machine."""

    call: int
    rank: int
    command: str
    arguments: Mapping[str, Any]


class LearnerEnded:
    """The message that the learner has ended in order."""


class MachineSession:
    """One machine, for as long as its stream holds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._calls = PendingCalls()
        self._says: asyncio.Queue[RankCall | LearnerEnded | None] = asyncio.Queue()
        # Why there is nobody any more.
        self._lost: str | None = None

    @property
    def name(self) -> str:
        return f"machine {self.machine.number} ({self.machine.hostname})"

    async def next_message(self) -> RankCall | LearnerEnded | None:
        """Return the next message to the machine; None when its stream is to end."""
        return await self._says.get()

    def send_command(self, rank: int, command: str, arguments: Mapping[str, Any]) -> Answer:
        """See `RankHandle`."""
        if self._lost is not None:
            return failed_answer(self._lost)
        call, answer = self._calls.begin_call(command)
        self._says.put_nowait(RankCall(call, rank, command, arguments))
        return answer

    def complete_call(self, call: int, result: "protocol.Message") -> None:
        """Complete a call with a rank's result. Raises KeyError for an unknown call."""
        self._calls.complete_call(call, result)

    def fail_call(self, call: int, problem: str, *, rank_ended: bool) -> None:
        """Fail a call with a rank's problem. Raises KeyError for an unknown call."""
        if rank_ended:
            self._lost = self._lost or f"{self.name}: {problem}"
        self._calls.fail_call(call, f"{self.name}: {problem}")

    def mark_lost(self, why: str) -> None:
        """Mark the machine as lost: its ranks are gone, or will be."""
        if self._lost is None:
            self._lost = f"{self.name} {why}"
        self._calls.fail_all(self._lost)
        self._says.put_nowait(None)

    @property
    def is_lost(self) -> bool:
        """True when one of its ranks, or the whole machine, is gone."""
        return self._lost is not None

    def send_home(self) -> None:
        """Tell it that it is not needed any more."""
        self._says.put_nowait(LearnerEnded())
        self.mark_lost("was sent home")


class RemoteRank:
    """One rank of a machine. Implements `ranks.pending_calls.RankHandle`."""

    def __init__(self, session: MachineSession, rank: int) -> None:
        self._session = session
        self._rank = rank

    @property
    def has_ended(self) -> bool:
        """See `RankHandle`."""
        return self._session.is_lost

    def send_command(self, command: str, arguments: Mapping[str, Any]) -> Answer:
        """See `RankHandle`."""
        return self._session.send_command(self._rank, command, arguments)

    def kill(self) -> None:
        """End all of the machine's ranks with its stream."""
        self._session.mark_lost("was given up")

    async def close(self) -> None:
        """See `RankHandle`."""
        self.kill()


class MachineRoster:
    """The machines that have joined `own`, the learner's machine."""

    def __init__(self, own: Machine) -> None:
        self._own = own
        self._sessions: dict[int, MachineSession] = {}
        self._joined = asyncio.Event()

    @property
    def further_count(self) -> int:
        """The number of machines besides the learner's."""
        return len(self._expected_numbers)

    def admit_machine(self, machine: Machine) -> MachineSession:
        """Admit a machine, which takes part from the next start of the ranks on.

        Raises WrongMachineError."""
        self._own.check_joining(machine)
        known = self._sessions.get(machine.number)
        if known is not None:
            known.mark_lost("has joined again")
        session = self._sessions[machine.number] = MachineSession(machine)
        self._joined.set()
        _log.info("a machine has joined", machine=machine.number, hostname=machine.hostname)
        return session

    def remove_session(self, session: MachineSession, why: str) -> None:
        """Remove a machine whose stream has ended."""
        if not session.is_lost:
            _log.warning("a machine is lost", machine=session.machine.number, why=why)
        session.mark_lost(why)
        if self._sessions.get(session.machine.number) is session:
            del self._sessions[session.machine.number]

    async def wait_until_complete(self, limit_s: float) -> Sequence[MachineSession]:
        """Wait for all further machines and return their sessions in order.

        Raises RankError that names those which are not there in time."""
        try:
            async with asyncio.timeout(limit_s):
                while self._missing_numbers:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            missing = ", ".join(map(str, self._missing_numbers))
            raise RankError(
                f"machine {missing} of {self._own.machines} has not joined in {limit_s:g} s: run"
                " `python -m services.learner.ranks --replica NUMBER` with this spec there, see"
                " its log, or set learner.rank.nodes = 1"
            ) from None
        return [self._sessions[number] for number in self._expected_numbers]

    def close(self, *, over: bool) -> None:
        """End all streams; `over` when the learner will not come back."""
        for session in list(self._sessions.values()):
            if over:
                session.send_home()
            else:
                session.mark_lost("has lost its learner")
        self._sessions.clear()

    @property
    def _expected_numbers(self) -> range:
        return range(1, self._own.machines)

    @property
    def _missing_numbers(self) -> list[int]:
        return [number for number in self._expected_numbers if number not in self._sessions]


@contextmanager
def dismiss_at_end(roster: MachineRoster | None) -> Generator[None]:
    """Send all machines home when the block ends well, else have them join the next learner."""
    over = False
    try:
        yield
        over = True
    finally:
        if roster is not None:
            roster.close(over=over)
