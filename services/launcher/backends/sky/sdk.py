"""Client over SkyPilot's SDK: the only place that calls it.

Every call is a blocking request to SkyPilot's API server, so each runs in a thread. The SDK waits
for an answer without a limit, even on a silently lost connection: each query has a limit here,
after which it is left to its thread. Submissions have the limit of the replica's start."""

import asyncio
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import yaml

from services.launcher.backends.ports import BackendError
from services.launcher.backends.sky import errors
from services.launcher.backends.sky.blocking_calls import run_in_thread
from services.launcher.backends.sky.pending_requests import PendingRequests
from services.launcher.backends.sky.ports import Document
from services.launcher.backends.sky.status import NO_JOB, Cluster, Job, Place
from services.launcher.backends.sky.task_documents import fill_secrets

T = TypeVar("T")
_NOT_INSTALLED = (
    'launcher.backend = "sky" needs SkyPilot, which this environment lacks ({error}); `make sky`'
    " makes one that has it: run .venv-sky/bin/flotilla"
)
# Fields of a managed job that are read below.
_JOB_FIELDS = (
    *("job_id", "task_id", "job_name", "task_name", "status", "submitted_at", "start_at"),
    *("cloud", "region", "accelerators", "failure_reason"),
)
# Cloud of a job that has had no machine yet.
_NOWHERE = "-"
# SkyPilot lists the clusters of managed jobs only in debug mode.
_SHOW_MANAGED = "SKYPILOT_DEBUG"
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
            self._jobs: Any = import_module("sky.jobs")
            self._errors: Any = import_module("sky.exceptions")
            self._server: Any = import_module("sky.server.common")
            self._dags: Any = import_module("sky.utils.dag_utils")
            common: Any = import_module("sky.utils.common")
        except ImportError as error:
            raise BackendError(_NOT_INSTALLED.format(error=error)) from error
        self._refresh = common.StatusRefreshMode.FORCE
        self._requests = PendingRequests(self._sky)

    async def list_jobs(self) -> list[Job]:
        def fetch_jobs() -> list[Job]:
            request = self._jobs.queue_v2(refresh=False, all_users=True, fields=_JOB_FIELDS)
            records: Any = self._sky.get(request)
            return [_job_from_record(record) for record in records[0]]

        return await self._ask_within(self._quick_s, fetch_jobs)

    async def list_clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        def fetch_clusters() -> list[Cluster]:
            if certain:
                with _managed.clusters_shown():
                    request = self._sky.status(list(certain), self._refresh, all_users=True)
                self._sky.get(request)
            with _managed.clusters_shown():
                request = self._sky.status(all_users=True)
            return [_cluster_from_record(record) for record in self._sky.get(request)]

        return await self._ask_within(self._slow_s if certain else self._quick_s, fetch_clusters)

    async def submit_group(
        self, documents: Sequence[Document], secrets: Sequence[Mapping[str, str]]
    ) -> int:
        def submit_dag() -> int:
            # Only this text holds the values; it goes to SkyPilot's server and nowhere else.
            filled = [documents[0], *map(fill_secrets, documents[1:], secrets)]
            dag = self._dags.load_job_group_from_yaml_str(yaml.safe_dump_all(filled))
            replicas = [str(document["name"]) for document in documents[1:]]
            return self._follow_launch(replicas, lambda: self._jobs.launch(dag))

        return await self._attempt_submission(submit_dag)

    async def submit_job(self, document: Document, secrets: Mapping[str, str], group: int) -> int:
        def submit_task() -> int:
            task = self._sky.Task.from_yaml_config(fill_secrets(document, secrets))
            name = str(document["name"])
            return self._follow_launch([name], lambda: self._jobs.launch(task, job_group=group))

        return await self._attempt_submission(submit_task)

    def _follow_launch(self, replicas: Sequence[str], launch: Callable[[], Any]) -> int:
        ids, _ = self._requests.follow_submission(replicas, launch)
        return int(ids[0])

    async def launch_cluster(self, document: Document, secrets: Mapping[str, str]) -> int:
        def submit_cluster() -> int:
            task = self._sky.Task.from_yaml_config(fill_secrets(document, secrets))
            name = str(document["name"])
            launch = self._sky.launch
            job_id, _ = self._requests.follow_submission(
                [name], lambda: launch(task, cluster_name=name)
            )
            return int(job_id)

        return await self._attempt_submission(submit_cluster)

    async def get_job_status(self, cluster: str) -> str | None:
        def fetch_status() -> str | None:
            try:
                found: Any = self._sky.get(self._sky.job_status(cluster))
            except self._errors.ClusterDoesNotExist:
                return None
            status = next(iter(found.values()), None)
            return status.value if status is not None else NO_JOB

        return await self._ask_within(self._slow_s, fetch_status)

    async def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        def cancel_managed() -> None:
            self._sky.get(self._jobs.cancel(job_ids=list(job_ids), all_users=False))

        if job_ids:
            await self._ask_within(self._slow_s, cancel_managed)

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


class _ManagedClusterListing:
    """Switch that has SkyPilot list the clusters of managed jobs during a query.

    Concurrent queries share it without waiting: a server may never answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries = 0
        self._before: str | None = None

    @contextmanager
    def clusters_shown(self) -> Generator[None]:
        with self._lock:
            if self._queries == 0:
                self._before = os.environ.get(_SHOW_MANAGED)
                os.environ[_SHOW_MANAGED] = "1"
            self._queries += 1
        try:
            yield
        finally:
            with self._lock:
                self._queries -= 1
                if self._queries == 0:
                    self._restore_variable()

    def _restore_variable(self) -> None:
        if self._before is None:
            del os.environ[_SHOW_MANAGED]
        else:
            os.environ[_SHOW_MANAGED] = self._before


_managed = _ManagedClusterListing()


def _job_from_record(record: Any) -> Job:
    task = record.task_name or record.job_name or ""
    return Job(
        job_id=record.job_id,
        name=record.job_name or "",
        task=task,
        status=record.status.value if record.status else "",
        submitted=record.submitted_at is not None,
        started=record.start_at is not None,
        # SkyPilot's undocumented name.
        cluster=f"{task}-{record.job_id}",
        place=_place_from_fields(record.cloud, record.region, record.accelerators),
        reason=record.failure_reason or "",
    )


def _cluster_from_record(record: Any) -> Cluster:
    # The record has its accelerators only as display text; some handles lack them.
    resources = getattr(record.handle, "launched_resources", None)
    accelerators = resources.accelerators if resources is not None else None
    place = _place_from_fields(record.cloud, record.region, accelerators)
    return Cluster(record.name, record.status.value, record.is_managed, place)


def _place_from_fields(
    cloud: str | None, region: str | None, accelerators: Mapping[str, float] | None
) -> Place | None:
    if not cloud or cloud == _NOWHERE:
        return None
    found = "".join(f"{name}:{count:g}" for name, count in (accelerators or {}).items())
    return Place(cloud.lower(), region or "", found)
