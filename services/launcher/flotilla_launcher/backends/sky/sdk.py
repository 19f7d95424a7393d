"""Client over SkyPilot's SDK: the only place that calls it.

Every call is a blocking request to SkyPilot's API server, so each runs in a thread. The SDK waits
for an answer without a limit, even on a silently lost connection: each query has a limit here,
after which it is left to its thread. Submissions have the limit of the replica's start."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from flotilla_launcher.backends.ports import BackendError
from flotilla_launcher.backends.sky import errors
from flotilla_launcher.backends.sky.blocking_calls import run_in_thread
from flotilla_launcher.backends.sky.pending_requests import PendingRequests
from flotilla_launcher.backends.sky.ports import Document
from flotilla_launcher.backends.sky.status import NO_JOB, UP, Cluster, Place
from flotilla_launcher.backends.sky.task_documents import fill_secrets

T = TypeVar("T")
_NOT_INSTALLED = (
    'launcher.backend = "sky" needs SkyPilot, which this environment lacks ({error}); `make sky`'
    " makes one that has it: run .venv-sky/bin/flotilla"
)
# Limits of answers from the server's own tables, and of those that involve clouds and machines.
_QUICK_S, _SLOW_S = 120.0, 600.0


class SkyClient:
    """Client of SkyPilot's server. Implements `ports.SkyPilotApi`, which describes the methods."""

    def __init__(self, *, quick_s: float = _QUICK_S, slow_s: float = _SLOW_S) -> None:
        self._quick_s, self._slow_s = quick_s, slow_s
        # A client must not start a server of its own.
        os.environ.setdefault("SKYPILOT_DISABLE_LOCAL_API_SERVER", "1")
        os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
        try:
            self._sky: Any = import_module("sky")
            self._errors: Any = import_module("sky.exceptions")
            self._server: Any = import_module("sky.server.common")
            common: Any = import_module("sky.utils.common")
        except ImportError as error:
            raise BackendError(_NOT_INSTALLED.format(error=error)) from error
        self._refresh = common.StatusRefreshMode.FORCE
        self._requests = PendingRequests(self._sky)

    async def list_clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        def fetch_clusters() -> list[Cluster]:
            if certain:
                self._sky.get(self._sky.status(list(certain), self._refresh, all_users=True))
            records = self._sky.get(self._sky.status(all_users=True))
            return [_cluster_from_record(record) for record in records]

        return await self._ask_within(self._slow_s if certain else self._quick_s, fetch_clusters)

    async def launch_cluster(self, document: Document, secrets: Mapping[str, str]) -> None:
        def submit_cluster() -> None:
            task = self._sky.Task.from_yaml_config(fill_secrets(document, secrets))
            name = str(document["name"])
            launch = self._sky.launch
            self._requests.follow_submission(name, lambda: launch(task, cluster_name=name))

        await self._attempt_submission(submit_cluster)

    async def get_job_status(self, cluster: str) -> str | None:
        def fetch_status() -> str | None:
            try:
                found: Any = self._sky.get(self._sky.job_status(cluster))
            except self._errors.ClusterDoesNotExist:
                return None
            except self._errors.ClusterNotUpError as error:
                # Up without an address: the server went while it launched it, and nobody will
                # finish that.
                if getattr(error.cluster_status, "value", "") == UP:
                    return NO_JOB
                raise
            status = next(iter(found.values()), None)
            return status.value if status is not None else NO_JOB

        return await self._ask_within(self._slow_s, fetch_status)

    async def tear_down_cluster(self, cluster: str) -> None:
        def tear_down() -> None:
            try:
                self._sky.get(self._sky.down(cluster))
            except (self._errors.ClusterDoesNotExist, ValueError):
                return

        await self._ask_within(self._slow_s, tear_down)

    async def is_start_pending(self, replica: str) -> bool:
        return await self._ask_within(
            self._quick_s, lambda: self._requests.is_start_pending(lambda name: name == replica)
        )

    async def cancel_pending(self, wanted: Callable[[str], bool]) -> bool:
        return await self._ask_within(self._quick_s, lambda: self._requests.cancel_pending(wanted))

    async def _ask_within(self, limit_s: float, call: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await run_in_thread(lambda: self._call_server(call, errors.question_error))
        except TimeoutError as error:
            raise errors.timeout_error(limit_s) from error

    async def _attempt_submission(self, call: Callable[[], T]) -> T:
        return await run_in_thread(lambda: self._call_server(call, errors.submission_error))

    def _call_server(
        self, call: Callable[[], T], translate: Callable[[Any, Exception], Exception]
    ) -> T:
        try:
            self._server.check_server_healthy()
            return call()
        # SkyPilot re-raises any exception of its server; none of them is an answer.
        except Exception as error:
            raise translate(self._errors, error) from error


def _cluster_from_record(record: Any) -> Cluster:
    # The record has its accelerators only as display text; some handles lack them.
    resources = getattr(record.handle, "launched_resources", None)
    return Cluster(record.name, record.status.value, _place_of(record, resources))


def _place_of(record: Any, resources: Any) -> Place | None:
    if not record.cloud:
        return None
    accelerators = getattr(resources, "accelerators", None) or {}
    found = "".join(f"{name}:{count:g}" for name, count in accelerators.items())
    zone = getattr(resources, "zone", None) or ""
    return Place(record.cloud.lower(), record.region or "", found, zone)
