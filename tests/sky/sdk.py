"""SkyPilot's SDK in few words; it is imported late, because only one environment has it."""

import io
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.support.waiting import wait_until

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


def until(what: str, reached: Callable[[], bool]) -> None:
    wait_until(reached, _LIMIT_S, lambda: what)
