"""State of the SkyPilot of the tests, in one file: it outlives its server."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Document = dict[str, Any]


@dataclass(slots=True)
class Cluster:
    """One of SkyPilot's table. `job` is the status of its job, once it has one. It has no address
    if the server went while it launched it."""

    name: str
    document: Document
    status: str = "INIT"
    job: str | None = None
    has_address: bool = True


@dataclass(slots=True)
class Machine:
    """A machine that the cloud has and bills. A bare one runs nothing."""

    booted: float
    pid: int = 0
    code: int | None = None


@dataclass(slots=True)
class State:
    """Everything."""

    clusters: dict[str, Cluster] = field(default_factory=dict[str, Cluster])
    machines: dict[str, Machine] = field(default_factory=dict[str, Machine])
    # By the names of replicas: the infra of each request for a machine, and the most machines that
    # it has had at a time.
    infras: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    most: dict[str, int] = field(default_factory=dict[str, int])
    # How often a client asked about the job of each cluster.
    looks: dict[str, int] = field(default_factory=dict[str, int])


def read(file: Path) -> State:
    """Nothing yet where there is no file."""
    if not file.exists():
        return State()
    found = json.loads(file.read_text())
    return State(
        clusters={name: Cluster(**each) for name, each in found["clusters"].items()},
        machines={name: Machine(**each) for name, each in found["machines"].items()},
        infras=found["infras"],
        most=found["most"],
        looks=found["looks"],
    )


def write(file: Path, state: State) -> None:
    """Whole or not at all: the server may be killed at any moment."""
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(asdict(state)))
    draft.replace(file)


@dataclass(frozen=True, slots=True)
class Script:
    """Events to come, in the words of a test; read at every turn. Times are seconds."""

    # No machine for the first so many requests of each replica.
    sold_out: int = 0
    # From a request's arrival to its first effect; from the request for a machine to having it;
    # from there to the start of its work.
    accept_s: float = 0.0
    boot_s: float = 0.0
    setup_s: float = 0.0
    down_s: float = 0.0
    # Whether there is another machine for one that was taken away.
    recovers: bool = True
    setup_fails: bool = False
    # What is wrong, in the name of an exception, with the worker of the server that deals with the
    # first so many submissions.
    broken: str = ""
    broken_times: int = 2
    # Machines come, but no login succeeds.
    no_login: bool = False
    # Machines run nothing; they end when a test ends them.
    bare: bool = True


def script(file: Path) -> Script:
    return Script(**json.loads(file.read_text())) if file.exists() else Script()
