"""SkyPilot's SDK in few words; it is imported late, because only one environment has it."""

import io
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Two cores launch a cluster in about a minute.
_LIMIT_S = 400.0


def launch(task: Any, cluster: str) -> tuple[int, Any]:
    """The number of the job and the handle of the new cluster that runs it."""
    sky = import_module("sky")
    return sky.get(sky.launch(task, cluster_name=cluster))


def logs(cluster: str, job: int) -> str:
    """Return a job's output until it ends."""
    kept = io.StringIO()
    import_module("sky").tail_logs(cluster, job, follow=True, output_stream=kept)
    return kept.getvalue()


def queue(job: int) -> list[tuple[str, int]]:
    """State and Job Group of each task of a managed job."""
    sky, jobs = import_module("sky"), import_module("sky.jobs")
    records, *_ = sky.get(jobs.queue_v2(refresh=False, job_ids=[job]))
    return [(record.status.name, record.root_job_id) for record in records]


def recoveries(job: int) -> list[int]:
    """Count the new clusters that each task of a managed job has been given."""
    sky, jobs = import_module("sky"), import_module("sky.jobs")
    records, *_ = sky.get(jobs.queue_v2(refresh=False, job_ids=[job]))
    return [record.recovery_count for record in records]


def until(what: str, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not reached():
        assert time.monotonic() < deadline, f"waited {_LIMIT_S:.0f} s in vain for {what}"
        time.sleep(2)
