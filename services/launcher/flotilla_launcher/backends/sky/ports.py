"""Port of SkyPilot as the backend for machines needs it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flotilla_launcher.backends.sky.status import Cluster

Document = dict[str, Any]


class SkyPilotApi(Protocol):
    """Queries and requests to SkyPilot's server.

    Any method raises BackendUnreachable if its result is unknown. Submissions also raise
    CapacityError, SetupError, StartLostError and BackendError."""

    async def list_clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        """List the table of clusters; `certain` ones are checked at their clouds first."""
        ...

    async def launch_cluster(self, document: Document, secrets: Mapping[str, str]) -> None:
        """Start a cluster with a job on it; return once the job is submitted there."""
        ...

    async def get_job_status(self, cluster: str) -> str | None:
        """Return the status of a cluster's only job; None if there is no cluster,
        NO_JOB if it never got one."""
        ...

    async def tear_down_cluster(self, cluster: str) -> None:
        """End a cluster; nothing if there is none."""
        ...

    async def is_start_pending(self, replica: str) -> bool:
        """Return whether an earlier request, also of another launcher, may still start the
        replica."""
        ...

    async def cancel_pending(self, wanted: Callable[[str], bool]) -> bool:
        """Cancel unanswered requests that start these replicas; return whether there were any.

        A cancelled request may have been fulfilled at the last moment."""
        ...
