"""Status of SkyPilot's clusters and of the job on each, in the launcher's terms. Pure."""

import signal
from dataclasses import dataclass

from flotilla_launcher.state import ExitStatus

# Stands for the status of a cluster's job if its launch ended before it got one.
NO_JOB = "NO_JOB"
# Status of a cluster whose machines run.
UP = "UP"
# By the names in SkyPilot's JobStatus. One that is missing here is of an active job.
_EXITS = {
    "SUCCEEDED": ExitStatus(0),
    "CANCELLED": ExitStatus(-signal.SIGTERM),
    "FAILED": ExitStatus(1, "FAILED"),
    "FAILED_DRIVER": ExitStatus(1, "FAILED_DRIVER"),
    "FAILED_SETUP": ExitStatus(1, "FAILED_SETUP", unready=True),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a machine and what is in it: `aws`, `us-east-1`, as in `H100:8`, and
    `us-east-1a`."""

    cloud: str
    region: str = ""
    accelerators: str = ""
    zone: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.cloud, self.region) if part)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as SkyPilot's table has it."""

    name: str
    status: str
    place: Place | None = None


def exit_from_status(status: str) -> ExitStatus | None:
    """Return the exit of a replica by the status of its cluster's job; None while it is active."""
    return _EXITS.get(status)
