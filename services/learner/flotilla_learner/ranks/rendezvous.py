"""Rendezvous of a learner's ranks: those on other machines, and their meeting point."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.pending_calls import RankHandle


class Rendezvous(Protocol):
    """Way in which the ranks of one learner come together."""

    @property
    def spans_machines(self) -> bool:
        """True if ranks may be on other machines, which share no memory with the learner."""
        ...

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        """Wait for the ranks on other machines; return them in order.

        Raises RankError if one is missing."""
        ...

    async def open_address(self, first: RankHandle) -> str:
        """Return the address at which all ranks meet. Raises RankError."""
        ...


class SingleMachineRendezvous:
    """Ranks that are all children of this process, and meet at a file in shared memory."""

    spans_machines = False

    def __init__(self, shm_dir: Path, name: str) -> None:
        self._path = protocol.rendezvous_path(shm_dir, name)

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        return ()

    async def open_address(self, first: RankHandle) -> str:
        return f"file://{self._path}"
