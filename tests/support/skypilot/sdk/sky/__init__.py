"""The part of SkyPilot's client that the launcher uses. Server: tests/support/skypilot/server.

Found in place of SkyPilot by a launcher that has this folder's parent on its path.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sky import exceptions, transport


class Task:
    """A task document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    @classmethod
    def from_yaml_config(cls, document: dict[str, Any]) -> "Task":
        return cls(document)


def get(request: str) -> Any:
    """Return what came of a request, once it is over."""
    answer = transport.post("get", {"request": request})
    if answer.get("error"):
        raise exceptions.of(answer["error"])
    return transport.parsed(answer["kind"], answer["value"])


def launch(task: Task, cluster_name: str) -> str:
    return transport.submit("sky.launch", documents=[task.document], cluster=cluster_name)


def status(
    cluster_names: Sequence[str] | None = None, refresh: Any = None, *, all_users: bool = False
) -> str:
    return transport.submit("sky.status", names=list(cluster_names or []), refresh=bool(refresh))


def job_status(cluster_name: str) -> str:
    return transport.submit("sky.job_status", cluster=cluster_name)


def down(cluster_name: str) -> str:
    return transport.submit("sky.down", cluster=cluster_name)


def api_cancel(requests: Sequence[str], *, silent: bool = False) -> str:
    return transport.submit("sky.api_cancel", requests=list(requests))


def api_status() -> list[SimpleNamespace]:
    """The requests that are not over."""
    return [SimpleNamespace(**each) for each in transport.post("status", {})["requests"]]
