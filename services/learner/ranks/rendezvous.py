"""Rendezvous of a learner's ranks: which are on other machines, and how all find each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.learner.ranks import protocol
from services.learner.ranks.machines import MachineRoster, RemoteRank
from services.learner.ranks.pending_calls import RankHandle


class Rendezvous(Protocol):
    """The way in which the ranks of one learner come together."""

    @property
    def remote_rank_count(self) -> int:
        """The number of ranks on other machines, which share no memory with the learner."""
        ...

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        """Wait for the ranks on other machines; return them in their order.

        Raises RankError when one is missing."""
        ...

    async def open_address(self, first: RankHandle) -> str:
        """Return the address at which all ranks meet. Raises RankError."""
        ...


class SingleMachineRendezvous:
    """Ranks that are all children of this process, and meet at a file in shared memory."""

    remote_rank_count = 0

    def __init__(self, shm_dir: Path, name: str) -> None:
        self._path = protocol.rendezvous_path(shm_dir, name)

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        """See `Rendezvous`."""
        return ()

    async def open_address(self, first: RankHandle) -> str:
        """See `Rendezvous`."""
        return f"file://{self._path}"


class MultiMachineRendezvous:
    """Ranks that meet at a port which the first one opens at `host`.

    `host` is an address of this machine that all others reach."""

    def __init__(self, roster: MachineRoster, host: str, ranks: int, limit_s: float) -> None:
        """Plan for `ranks` on each machine, which wait up to `limit_s` for each other."""
        self._roster = roster
        self._host = host
        self._ranks = ranks
        self._limit_s = limit_s

    @property
    def remote_rank_count(self) -> int:
        """See `Rendezvous`."""
        return self._roster.further_count * self._ranks

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        """See `Rendezvous`."""
        sessions = await self._roster.wait_until_complete(self._limit_s)
        return [RemoteRank(session, slot) for session in sessions for slot in range(self._ranks)]

    async def open_address(self, first: RankHandle) -> str:
        """See `Rendezvous`."""
        return (await first.send_command("host", {"host": self._host}))["rendezvous"]
