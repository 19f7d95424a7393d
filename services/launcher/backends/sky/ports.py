"""What the backend for machines needs of SkyPilot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from services.launcher.backends.sky.status import Cluster, Job

Document = dict[str, Any]


class Client(Protocol):
    """Questions and wishes to SkyPilot's server.

    Any method raises BackendUnreachable where nothing is known of what came of it. Submissions
    also raise CapacityError, SetupError, StartLostError and BackendError.
    """

    async def jobs(self) -> list[Job]:
        """All tasks of managed jobs, ended ones too."""
        ...

    async def clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        """The table of clusters; `certain` ones are looked for at their clouds first."""
        ...

    async def submit_group(
        self, documents: Sequence[Document], secrets: Sequence[Mapping[str, str]]
    ) -> int:
        """Start a Job Group, return its id. `secrets` are those of each task, in order."""
        ...

    async def submit_job(self, document: Document, secrets: Mapping[str, str], group: int) -> int:
        """Start a dynamic member of a group, return its own id."""
        ...

    async def launch(self, document: Document, secrets: Mapping[str, str]) -> int:
        """Start a cluster with a job on it; returns once the job is submitted there."""
        ...

    async def job_status(self, cluster: str) -> str | None:
        """The status of a plain cluster's only job; None when the cluster is not there, NO_JOB
        when it was never given one."""
        ...

    async def cancel(self, job_ids: Sequence[int]) -> None:
        """End managed jobs; a group with all its members."""
        ...

    async def down(self, cluster: str) -> None:
        """End a cluster; nothing if there is none."""
        ...

    async def under_way(self, replica: str) -> bool:
        """Whether it may still come of what was asked before, be it by another launcher."""
        ...

    async def forget(self, wanted: Callable[[str], bool]) -> bool:
        """Cancel what was asked for these replicas and is not answered yet; whether there was any
        such thing. It may have come about at the last moment."""
        ...
