"""The harness of a backend, as the contract suite uses it.

A harness is a module `NAME_harness.py` in this folder whose `harness` is a class. It starts a real
server, names tasks that the server knows, and looks behind the gateway's back. What a backend
cannot do by its nature is missing from `can`; the cases that need it are then skipped by name.
"""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from flotilla_env_gateway.ports import Backend

Call = tuple[str, dict[str, Any]]


class Can(StrEnum):
    DATABASE = "show its databases"
    CHECKS = "report which checks passed and failed"
    REFUSE_DATA = "refuse data that does not exist"
    DIE = "lose one server and continue with another"
    RECLAIM = "find an instance by its tag alone"
    # Without it, a repeated creation is a second instance that the backend closes.
    IDEMPOTENT = "create once however often it is requested"
    ANNOTATE = "mark which tools only read"
    SHOW_END = "show by itself that an instance has ended"
    REFUSE = "refuse a call that is well formed"


class BackendHarness(Protocol):
    """`start` and `stop` are called once for all cases; each case builds the backend again."""

    name: str
    can: frozenset[Can]
    # Works in every state of every task and changes nothing.
    read_call: Call
    # May be executed at most once; need not succeed.
    write_call: Call
    # Well formed, and refused by the tool itself; needs Can.REFUSE.
    refused_call: Call
    # Arguments that the tool does not have.
    bad_call: Call
    # The reward of an episode in which nothing was done; None if it has no grade.
    untouched_reward: float | None = 0.0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def settings(self) -> Mapping[str, Any]:
        """The `[env_gateway]` section: the backend, and where its server is."""
        ...

    def task(self, index: int) -> Mapping[str, Any]:
        """A task that an untouched environment fails. The same index is the same task."""
        ...

    def solution(self, index: int) -> Sequence[Call]: ...

    async def running(self, backend: Backend) -> int:
        """Return how many instances run at the server, including those of other clients."""
        ...

    async def kill(self, backend: Backend, instance_id: str) -> None:
        """End an instance behind the gateway's back."""
        ...

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        """The server accepts what is sent to it, and answers nothing while this is open."""
        ...


def harness_names() -> list[str]:
    suffix = "_harness"
    modules = Path(__file__).parent.glob(f"*{suffix}.py")
    return sorted(path.stem.removesuffix(suffix) for path in modules)


def load_harness(name: str) -> BackendHarness:
    module = importlib.import_module(f"tests.env_gateway.backends.{name}_harness")
    return module.harness()
