"""Status of SkyPilot's jobs and clusters in the launcher's terms, and its meaning, pure."""

import signal
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.launcher.backends.sky import names
from services.launcher.state import ExitStatus


class JobStage(StrEnum):
    """Stage of a replica's job."""

    WAITING = "waiting"
    RUNNING = "running"
    # Preempted; SkyPilot looks for another machine.
    RECOVERING = "recovering"
    ENDING = "ending"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    # The machine could not be made ready.
    FAILED_SETUP = "failed_setup"
    # No machine was available.
    NO_CAPACITY = "no_capacity"
    # No machine can ever be available: the request is wrong.
    REFUSED = "refused"

    @property
    def over(self) -> bool:
        return self not in (
            JobStage.WAITING,
            JobStage.RUNNING,
            JobStage.RECOVERING,
            JobStage.ENDING,
        )


# Status of a job whose controller broke.
_ABANDONED = "FAILED_CONTROLLER"
# By the names in SkyPilot's ManagedJobStatus and, for plain clusters, JobStatus.
_STAGES = {
    "PENDING": JobStage.WAITING,
    "SUBMITTED": JobStage.WAITING,
    "STARTING": JobStage.WAITING,
    "INIT": JobStage.WAITING,
    "SETTING_UP": JobStage.RUNNING,
    "RUNNING": JobStage.RUNNING,
    "WINDING_DOWN": JobStage.RUNNING,
    "RECOVERING": JobStage.RECOVERING,
    "CANCELLING": JobStage.ENDING,
    "SUCCEEDED": JobStage.DONE,
    "CANCELLED": JobStage.CANCELLED,
    "FAILED": JobStage.FAILED,
    "FAILED_DRIVER": JobStage.FAILED,
    "FAILED_SETUP": JobStage.FAILED_SETUP,
    "FAILED_PRECHECKS": JobStage.REFUSED,
    "FAILED_NO_RESOURCE": JobStage.NO_CAPACITY,
    _ABANDONED: JobStage.FAILED_SETUP,
}


# Stands for the status of a cluster's job if its launch ended before it got one.
NO_JOB = "NO_JOB"
# Status of a job in the queue, and of one that will retry a failed request for machines.
_BACK_OFF = "PENDING"


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a machine and what is in it: `lambda`, `us-east-1`, and as in `H100:8`."""

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
    # Whether machines were requested, and whether the job has had some.
    submitted: bool = False
    started: bool = False
    cluster: str = ""
    place: Place | None = None
    reason: str = ""

    @property
    def stage(self) -> JobStage:
        if self.status == _BACK_OFF and self.submitted:
            # SkyPilot would retry there for ever; the launcher has other candidates and a budget.
            return JobStage.RECOVERING if self.started else JobStage.NO_CAPACITY
        return _STAGES.get(self.status, JobStage.WAITING)

    @property
    def over(self) -> bool:
        """True once SkyPilot has ended the job too."""
        return _STAGES.get(self.status, JobStage.WAITING).over

    @property
    def abandoned(self) -> bool:
        """True if SkyPilot has lost control of the job and may have left its machine up."""
        return self.status == _ABANDONED

    @property
    def exit(self) -> ExitStatus:
        """The exit of the job's replica, once the job is over."""
        return exit_from_stage(self.stage, self.reason)

    @property
    def goes_on(self) -> bool:
        return not self.over and self.stage is not JobStage.ENDING


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as SkyPilot's table has it; the table includes those of managed jobs."""

    name: str
    status: str
    managed: bool = False
    place: Place | None = None


def stage_from_status(status: str) -> JobStage:
    """Return the stage of a plain cluster's job."""
    return _STAGES.get(status, JobStage.WAITING)


def exit_from_stage(stage: JobStage, reason: str) -> ExitStatus:
    """Return the exit of a replica whose job is over."""
    match stage:
        case JobStage.DONE:
            return ExitStatus(0)
        case JobStage.CANCELLED:
            return ExitStatus(-signal.SIGTERM)
        case _:
            return ExitStatus(1, reason, unready=stage is JobStage.FAILED_SETUP)


def newest_job(jobs: Iterable[Job], task: str, since: int = 0) -> Job | None:
    """Return the last job of a replica; earlier ones are of its earlier starts."""
    found = [job for job in jobs if job.task == task and job.job_id >= since]
    return max(found, key=lambda job: job.job_id, default=None)


def went_with_group(jobs: Iterable[Job], job: Job) -> bool:
    """Return whether a member was cancelled because the learner of its group had ended."""
    name = names.learner_name_for(job.task)
    if job.stage is not JobStage.CANCELLED or job.task == name:
        return False
    learner = newest_job(jobs, name)
    return learner is None or not learner.goes_on or learner.job_id > job.job_id


def find_open_group(jobs: Iterable[Job], groups: Container[str], learner: str) -> int | None:
    """Return the id of a run's group by its possible names while its learner is active: only
    then may others join it."""
    found = [j.job_id for j in jobs if j.name in groups and j.task == learner and j.goes_on]
    return max(found, default=None)


def find_live_groups(jobs: Iterable[Job], groups: Container[str]) -> list[int]:
    """Return the ids of a run's groups of which anything is left."""
    return sorted({job.job_id for job in jobs if job.name in groups and not job.over})
