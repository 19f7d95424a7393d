"""SkyPilot in memory, controlled by a test."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.launcher.backends.ports import BackendUnreachable
from services.launcher.backends.sky.ports import Document
from services.launcher.backends.sky.status import Cluster, Job


class FakeSky:
    """A server of SkyPilot's; several clients may share it, as successors of one launcher do."""

    def __init__(self) -> None:
        self.table: list[Job] = []
        self.machines: dict[str, Cluster] = {}
        self.submitted: list[list[Document]] = []
        self.secrets: list[Mapping[str, str]] = []
        self.attempts: list[Document] = []
        # The error of the next submission.
        self.refusal: Exception | None = None
        # Called just before the error is raised.
        self.before_refusal: Callable[[], None] | None = None
        self.away = False
        # The delay between the state of an answer and its arrival.
        self.hesitate_s = 0.0
        # The status of the next submission, and whether machines were requested.
        self.status, self.requested = "RUNNING", True
        self.statuses: dict[str, str] = {}

    def put(self, task: str, **changes: Any) -> None:
        """Change the newest record of a task."""
        index = max(i for i, job in enumerate(self.table) if job.task == task)
        self.table[index] = replace(self.table[index], **changes)
        if self.table[index].over:
            self.machines.pop(self.table[index].cluster, None)

    def job(self, task: str) -> Job:
        return max((job for job in self.table if job.task == task), key=lambda job: job.job_id)

    def _submit(self, name: str, documents: Sequence[Document]) -> int:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            if self.before_refusal is not None:
                self.before_refusal()
            raise refusal
        number = max((job.job_id for job in self.table), default=0) + 1
        for document in documents:
            task = str(document["name"])
            cluster = f"{task}-{number}"
            self.table.append(Job(number, name, task, self.status, self.requested, cluster=cluster))
            self.machines[cluster] = Cluster(cluster, "UP", managed=True)
        return number

    def _answer(self) -> None:
        if self.away:
            raise BackendUnreachable("the server is away")

    async def list_jobs(self) -> list[Job]:
        self._answer()
        found = list(self.table)
        await asyncio.sleep(self.hesitate_s)
        return found

    def stand_still(self, cluster: str, status: str) -> None:
        """Set the state of its machine in the cloud to one other than UP."""
        self.machines[cluster] = Cluster(cluster, status)

    async def list_clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        self._answer()
        return list(self.machines.values())

    async def submit_group(
        self, documents: Sequence[Document], secrets: Sequence[Mapping[str, str]]
    ) -> int:
        self._answer()
        self.submitted.append(list(documents))
        self.secrets += secrets
        return self._submit(str(documents[0]["name"]), documents[1:])

    async def submit_job(self, document: Document, secrets: Mapping[str, str], group: int) -> int:
        self._answer()
        assert any(job.job_id == group and not job.over for job in self.table)
        self.attempts.append(document)
        self.secrets.append(secrets)
        return self._submit(str(document["name"]), [document])

    async def launch_cluster(self, document: Document, secrets: Mapping[str, str]) -> int:
        self._answer()
        name = str(document["name"])
        self.attempts.append(document)
        self.secrets.append(secrets)
        self.machines[name] = Cluster(name, "UP")
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.statuses[name] = self.status
        return 1

    async def get_job_status(self, cluster: str) -> str | None:
        self._answer()
        found = self.machines.get(cluster)
        if found is not None and found.status != "UP":
            raise BackendUnreachable(f"{cluster} is {found.status}")
        return self.statuses.get(cluster) if found is not None else None

    async def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        self._answer()
        for job in [job for job in self.table if job.job_id in job_ids and not job.over]:
            self.put(job.task, status="CANCELLED")

    async def tear_down_cluster(self, cluster: str) -> None:
        self._answer()
        self.machines.pop(cluster, None)

    async def is_start_pending(self, replica: str) -> bool:
        self._answer()
        return False

    async def cancel_pending(self, wanted: Callable[[str], bool]) -> bool:
        self._answer()
        return False
