"""State of the SkyPilot of the tests, in one file: it outlives its server."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Document = dict[str, Any]
OVER = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED")


@dataclass(slots=True)
class ManagedTask:
    """One task of a managed job. `root` is the group that it is in or has joined."""

    job_id: int
    root: int
    name: str
    task: str
    document: Document
    primary: bool = False
    status: str = "PENDING"
    # When a machine was requested, and when it had one: from then on a PENDING one was refused
    # and sleeps.
    submitted_at: float | None = None
    start_at: float | None = None
    # Whether its machine is set up.
    ready: bool = False
    since: float = 0.0
    reason: str = ""
    recoveries: int = 0

    @property
    def cluster(self) -> str:
        return f"{self.task}-{self.job_id}"

    @property
    def over(self) -> bool:
        return self.status in OVER

    def becomes(self, status: str, reason: str = "") -> None:
        self.status, self.since = status, time.time()
        self.reason = reason or self.reason


@dataclass(slots=True)
class Cluster:
    """One of SkyPilot's table. `job` is the status of a plain cluster's job, once it has one."""

    name: str
    document: Document
    managed: bool
    status: str = "INIT"
    job: str | None = None


@dataclass(slots=True)
class Machine:
    """A machine that the cloud has and bills. A bare one runs nothing."""

    booted: float
    pid: int = 0
    code: int | None = None


@dataclass(slots=True)
class State:
    """Everything. `requests` counts the requests for machines by the name of the replica."""

    tasks: list[ManagedTask] = field(default_factory=list[ManagedTask])
    clusters: dict[str, Cluster] = field(default_factory=dict[str, Cluster])
    machines: dict[str, Machine] = field(default_factory=dict[str, Machine])
    requests: dict[str, int] = field(default_factory=dict[str, int])
    # The most machines that a replica has had at a time, and the infras that it was to be on.
    most: dict[str, int] = field(default_factory=dict[str, int])
    infras: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def next_job(self) -> int:
        return max((task.job_id for task in self.tasks), default=0) + 1


def read(file: Path) -> State:
    """Nothing yet where there is no file."""
    if not file.exists():
        return State()
    found = json.loads(file.read_text())
    return State(
        tasks=[ManagedTask(**task) for task in found["tasks"]],
        clusters={name: Cluster(**each) for name, each in found["clusters"].items()},
        machines={name: Machine(**each) for name, each in found["machines"].items()},
        requests=found["requests"],
        most=found["most"],
        infras=found["infras"],
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
    cancel_s: float = 0.0
    down_s: float = 0.0
    # Whether there is another machine for one that was taken away.
    recovers: bool = True
    setup_fails: bool = False
    # What is wrong, in the name of an exception, with the worker of the server that deals with the
    # first so many submissions.
    broken: str = ""
    broken_times: int = 2
    # Machines of plain clusters come, but no login succeeds.
    no_login: bool = False
    # Machines run nothing; they end when a test ends them.
    bare: bool = True


def script(file: Path) -> Script:
    return Script(**json.loads(file.read_text())) if file.exists() else Script()
