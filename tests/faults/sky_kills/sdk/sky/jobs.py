"""Managed jobs."""

from collections.abc import Sequence
from typing import Any

from sky import Task, transport


def launch(task: Task | list[dict[str, Any]], job_group: int | None = None) -> str:
    documents = [task.document] if isinstance(task, Task) else task
    return transport.submit("sky.jobs.launch", documents=documents, group=job_group)


def queue_v2(refresh: bool, all_users: bool = False, fields: Sequence[str] = ()) -> str:
    return transport.submit("sky.jobs.queue")


def cancel(job_ids: Sequence[int], all_users: bool = False) -> str:
    return transport.submit("sky.jobs.cancel", job_ids=list(job_ids))
