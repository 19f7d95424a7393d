"""Which of a learner's ranks are elsewhere, and how all find each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.learner.ranks import protocol
from services.learner.ranks.machines import RemoteRank, Roll
from services.learner.ranks.pending_calls import RankHandle


class Meeting(Protocol):
    """How the ranks of one learner come together."""

    @property
    def others(self) -> int:
        """How many ranks are on other machines: those share no memory with the learner."""
        ...

    async def gather(self) -> Sequence[RankHandle]:
        """The ranks on other machines, in their order. Raises RankError when one is missing."""
        ...

    async def place(self, first: RankHandle) -> str:
        """Where all are to meet. Raises RankError."""
        ...


class OnOneMachine:
    """All ranks are children of this process, and meet at a file in shared memory."""

    others = 0

    def __init__(self, shm_dir: Path, name: str) -> None:
        self._path = protocol.rendezvous_path(shm_dir, name)

    async def gather(self) -> Sequence[RankHandle]:
        """See `Meeting`."""
        return ()

    async def place(self, first: RankHandle) -> str:
        """See `Meeting`."""
        return f"file://{self._path}"


class AcrossMachines:
    """The first rank opens a port at `host`, an address of this machine that all others reach."""

    def __init__(self, roll: Roll, host: str, ranks: int, limit_s: float) -> None:
        """`ranks` are on each machine; they wait for each other so long."""
        self._roll = roll
        self._host = host
        self._ranks = ranks
        self._limit_s = limit_s

    @property
    def others(self) -> int:
        """See `Meeting`."""
        return self._roll.others * self._ranks

    async def gather(self) -> Sequence[RankHandle]:
        """See `Meeting`."""
        sessions = await self._roll.complete(self._limit_s)
        return [RemoteRank(session, slot) for session in sessions for slot in range(self._ranks)]

    async def place(self, first: RankHandle) -> str:
        """See `Meeting`."""
        return (await first.send("host", {"host": self._host}))["rendezvous"]
