"""What SkyPilot says of jobs and clusters, in the launcher's words, and what it means, pure."""

import signal
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.launcher.backends.sky import names
from services.launcher.state import Exit


class Stage(StrEnum):
    """Where a replica's job is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    # Its machine was taken away; SkyPilot looks for another.
    RECOVERING = "recovering"
    ENDING = "ending"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    # The machine was there, and could not be made ready.
    FAILED_SETUP = "failed_setup"
    # No machine was to be had.
    NO_CAPACITY = "no_capacity"
    # No machine could be had, ever: the request is wrong.
    REFUSED = "refused"

    @property
    def over(self) -> bool:
        return self not in (Stage.WAITING, Stage.RUNNING, Stage.RECOVERING, Stage.ENDING)


# Of a job whose controller broke.
_ABANDONED = "FAILED_CONTROLLER"
# By the names of SkyPilot's ManagedJobStatus and, for clusters of their own, JobStatus.
_STAGES = {
    "PENDING": Stage.WAITING,
    "SUBMITTED": Stage.WAITING,
    "STARTING": Stage.WAITING,
    "INIT": Stage.WAITING,
    "SETTING_UP": Stage.RUNNING,
    "RUNNING": Stage.RUNNING,
    "WINDING_DOWN": Stage.RUNNING,
    "RECOVERING": Stage.RECOVERING,
    "CANCELLING": Stage.ENDING,
    "SUCCEEDED": Stage.DONE,
    "CANCELLED": Stage.CANCELLED,
    "FAILED": Stage.FAILED,
    "FAILED_DRIVER": Stage.FAILED,
    "FAILED_SETUP": Stage.FAILED_SETUP,
    "FAILED_PRECHECKS": Stage.REFUSED,
    "FAILED_NO_RESOURCE": Stage.NO_CAPACITY,
    _ABANDONED: Stage.FAILED_SETUP,
}


# In place of the status of a cluster's job: its launch ended before it was given one.
NO_JOB = "NO_JOB"
# Of a job that waits for its turn, and of one that has asked in vain and will ask again.
_BACK_OFF = "PENDING"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a machine is, and what is in it: `lambda`, `us-east-1`, and as in `H100:8`."""

    cloud: str
    region: str = ""
    accelerators: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.cloud, self.region) if part)


@dataclass(frozen=True, slots=True)
class Job:
    """One task of a managed job. `task` names its replica; `name` the group or the job itself."""

    job_id: int
    name: str
    task: str
    status: str
    # Whether machines were asked for, and whether it has had them.
    submitted: bool = False
    started: bool = False
    cluster: str = ""
    place: Place | None = None
    reason: str = ""

    @property
    def stage(self) -> Stage:
        if self.status == _BACK_OFF and self.submitted:
            # SkyPilot would ask there for ever; the launcher has other candidates and a budget.
            return Stage.RECOVERING if self.started else Stage.NO_CAPACITY
        return _STAGES.get(self.status, Stage.WAITING)

    @property
    def over(self) -> bool:
        """Whether SkyPilot has ended it too."""
        return _STAGES.get(self.status, Stage.WAITING).over

    @property
    def abandoned(self) -> bool:
        """Whether SkyPilot has lost control of it, and with that perhaps left its machine up."""
        return self.status == _ABANDONED

    @property
    def exit(self) -> Exit:
        """How the replica ended that it was of, once it is over."""
        return exit_at(self.stage, self.reason)

    @property
    def goes_on(self) -> bool:
        return not self.over and self.stage is not Stage.ENDING


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines as SkyPilot's table has them; with them the jobs of its managed jobs."""

    name: str
    status: str
    managed: bool = False
    place: Place | None = None


def stage_of(status: str) -> Stage:
    """The stage of a plain cluster's job."""
    return _STAGES.get(status, Stage.WAITING)


def exit_at(stage: Stage, reason: str) -> Exit:
    """How a replica has ended whose job is over."""
    match stage:
        case Stage.DONE:
            return Exit(0)
        case Stage.CANCELLED:
            return Exit(-signal.SIGTERM)
        case _:
            return Exit(1, reason, unready=stage is Stage.FAILED_SETUP)


def newest(jobs: Iterable[Job], task: str, since: int = 0) -> Job | None:
    """The last job of a replica; earlier ones are of its earlier starts."""
    found = [job for job in jobs if job.task == task and job.job_id >= since]
    return max(found, key=lambda job: job.job_id, default=None)


def went_with_group(jobs: Iterable[Job], job: Job) -> bool:
    """Whether a member was cancelled because the learner of its group had ended."""
    name = names.learner_beside(job.task)
    if job.stage is not Stage.CANCELLED or job.task == name:
        return False
    learner = newest(jobs, name)
    return learner is None or not learner.goes_on or learner.job_id > job.job_id


def open_group(jobs: Iterable[Job], groups: Container[str], learner: str) -> int | None:
    """The id of a run's group by its possible names, while its learner goes on: only then may
    others join it."""
    found = [j.job_id for j in jobs if j.name in groups and j.task == learner and j.goes_on]
    return max(found, default=None)


def live_groups(jobs: Iterable[Job], groups: Container[str]) -> list[int]:
    """The ids of a run's groups of which anything is left."""
    return sorted({job.job_id for job in jobs if job.name in groups and not job.over})


def of_run(name: str, owner: str, run_id: str) -> bool:
    owned = names.parse(name)
    return owned is not None and (owned.owner, owned.run) == (owner, names.run_mark(run_id))


def mark_of(name: str) -> str:
    """The mark of the run that a name is of; empty if no launcher of ours gave it that name."""
    owned = names.parse(name)
    return "" if owned is None else owned.run


def unowned(name: str, owner: str, active: Iterable[str]) -> bool:
    """Whether a name is this launcher's, and of none of its active runs."""
    owned = names.parse(name)
    if owned is None or owned.owner != owner:
        return False
    return owned.run not in {names.run_mark(run_id) for run_id in active}
