"""SkyPilot's SDK in the launcher's words: the only place that calls it.

Every call is a request to SkyPilot's API server and blocks, so each runs in a thread. What goes
wrong is told apart by the type of its exception, never by its text.
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import yaml

from services.common.log import redact
from services.launcher.adapters.sky_requests import Requests
from services.launcher.adapters.threads import in_thread
from services.launcher.ports import (
    BackendError,
    BackendUnreachable,
    CapacityError,
    SetupError,
    StartLostError,
)
from services.launcher.sky.ports import Document
from services.launcher.sky.records import NO_JOB, Cluster, Job, Place
from services.launcher.sky.tasks import with_secrets

T = TypeVar("T")
_NO_SERVER = (
    "SkyPilot's API server cannot be asked ({error}); start one with `sky api start`, or name it in"
    " SKYPILOT_API_SERVER_ENDPOINT"
)
_NO_ANSWER = "SkyPilot's API server has no answer ({error}); it is asked again"
_NOT_INSTALLED = (
    'launcher.backend = "sky" needs SkyPilot, which this environment lacks ({error}); `make sky`'
    " makes one that has it: run .venv-sky/bin/flotilla"
)
# The fields of a managed job that are read below.
_JOB_FIELDS = (
    *("job_id", "task_id", "job_name", "task_name", "status", "submitted_at", "start_at"),
    *("cloud", "region", "accelerators", "failure_reason"),
)
# The cloud of a job that has had no machine yet.
_NOWHERE = "-"
# SkyPilot lists the clusters of managed jobs to those who debug it, and to nobody else.
_SHOW_MANAGED = "SKYPILOT_DEBUG"
# No wish causes these: a worker of SkyPilot's server is broken. One whose request was cancelled in
# the middle of an import stays so ("'LazyImport' object is not callable"); the others are not.
_BROKEN = (TypeError, AttributeError, NameError, LookupError, ImportError)
_environment = threading.Lock()


class SkyClient:
    """Calls SkyPilot. Methods raise BackendUnreachable where nothing is known of what came of it.

    Submissions also raise CapacityError, SetupError, StartLostError and BackendError.
    """

    def __init__(self) -> None:
        # A client must not start a server of its own behind the launcher's back.
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
        self._requests = Requests(self._sky)

    async def jobs(self) -> list[Job]:
        """All tasks of managed jobs, ended ones too."""

        def ask() -> list[Job]:
            request = self._jobs.queue_v2(refresh=False, all_users=True, fields=_JOB_FIELDS)
            records: Any = self._sky.get(request)
            return [_job(record) for record in records[0]]

        return await self._ask(ask)

    async def clusters(self, *, certain: Sequence[str] = ()) -> list[Cluster]:
        """SkyPilot's table of clusters; `certain` ones are looked for at their clouds first."""

        def ask() -> list[Cluster]:
            with _shown_managed():
                if certain:
                    request = self._sky.status(list(certain), self._refresh, all_users=True)
                    self._sky.get(request)
                request = self._sky.status(all_users=True)
            return [_cluster(record) for record in self._sky.get(request)]

        return await self._ask(ask)

    async def submit_group(
        self, documents: Sequence[Document], secrets: Sequence[Mapping[str, str]]
    ) -> int:
        """Start a Job Group and return its id. `secrets` are those of each task, in order."""

        def submit() -> int:
            # Values stand in this text alone: it goes to SkyPilot's server and nowhere else.
            filled = [documents[0], *map(with_secrets, documents[1:], secrets)]
            dag = self._dags.load_job_group_from_yaml_str(yaml.safe_dump_all(filled))
            replicas = [str(document["name"]) for document in documents[1:]]
            return self._submit(replicas, lambda: self._jobs.launch(dag))

        return await self._attempt(submit)

    async def submit_job(self, document: Document, secrets: Mapping[str, str], group: int) -> int:
        """Start a dynamic member of a group and return its own id."""

        def submit() -> int:
            task = self._sky.Task.from_yaml_config(with_secrets(document, secrets))
            name = str(document["name"])
            return self._submit([name], lambda: self._jobs.launch(task, job_group=group))

        return await self._attempt(submit)

    def _submit(self, replicas: Sequence[str], launch: Callable[[], Any]) -> int:
        ids, _ = self._requests.follow(replicas, launch)
        return int(ids[0])

    async def launch(self, document: Document, secrets: Mapping[str, str]) -> int:
        """Start a cluster with a job on it; return the job's id once it is submitted there."""

        def submit() -> int:
            task = self._sky.Task.from_yaml_config(with_secrets(document, secrets))
            name = str(document["name"])
            launch = self._sky.launch
            job_id, _ = self._requests.follow([name], lambda: launch(task, cluster_name=name))
            return int(job_id)

        return await self._attempt(submit)

    async def job_status(self, cluster: str) -> str | None:
        """The status of a plain cluster's only job; None when the cluster is not there, NO_JOB
        when it was never given one."""

        def ask() -> str | None:
            try:
                found: Any = self._sky.get(self._sky.job_status(cluster))
            except self._errors.ClusterDoesNotExist:
                return None
            status = next(iter(found.values()), None)
            return status.value if status is not None else NO_JOB

        return await self._ask(ask)

    async def cancel(self, job_ids: Sequence[int]) -> None:
        """End managed jobs, a group with all its members."""

        def ask() -> None:
            self._sky.get(self._jobs.cancel(job_ids=list(job_ids), all_users=False))

        if job_ids:
            await self._ask(ask)

    async def down(self, cluster: str) -> None:
        """End a cluster; nothing if there is none."""

        def ask() -> None:
            try:
                self._sky.get(self._sky.down(cluster))
            except (self._errors.ClusterDoesNotExist, ValueError):
                return

        await self._ask(ask)

    async def under_way(self, replica: str) -> bool:
        """Whether it may still come of what was asked before, be it by another launcher."""
        return await self._ask(lambda: self._requests.under_way(lambda name: name == replica))

    async def forget(self, wanted: Callable[[str], bool]) -> bool:
        """Cancel what was asked for these replicas and is not answered yet; whether there was any
        such thing. It may have come about at the last moment."""
        return await self._ask(lambda: self._requests.forget(wanted))

    async def _ask(self, call: Callable[[], T]) -> T:
        return await in_thread(lambda: self._asked(call))

    async def _attempt(self, call: Callable[[], T]) -> T:
        return await in_thread(lambda: self._attempted(call))

    def _asked(self, call: Callable[[], T]) -> T:
        """Whatever goes wrong with a question: its answer is not known."""
        try:
            self._server.check_server_healthy()
            return call()
        # SkyPilot hands on any exception of its server; none of them is an answer.
        except Exception as error:
            text = _NO_ANSWER if _is_servers(error) else _NO_SERVER
            raise BackendUnreachable(text.format(error=_brief(error))) from error

    def _attempted(self, call: Callable[[], T]) -> T:
        errors = self._errors
        try:
            self._server.check_server_healthy()
            return call()
        except errors.ResourcesUnavailableError as error:
            # Without a history nobody was asked: no such machine is on any list.
            known = bool(error.failover_history) and not error.no_failover
            raise (CapacityError if known else BackendError)(_brief(error)) from error
        except (errors.CommandFailureException, errors.ClusterSetUpError) as error:
            raise SetupError(_brief(error)) from error
        except errors.RequestCancelled as error:
            raise StartLostError("its start was cancelled") from error
        except (RuntimeError, OSError) as error:
            if not _is_servers(error):
                # The connection is lost, or the server and with it the request.
                raise BackendUnreachable(_NO_SERVER.format(error=_brief(error))) from error
            # A machine that nobody can log in to, or SkyPilot's own part of it failed; what it
            # could not reach, it may reach next time.
            kind = SetupError if isinstance(error, RuntimeError) else CapacityError
            raise kind(_brief(error)) from error
        # What is left is about the request itself, and SkyPilot says so in many types.
        except Exception as error:
            raise _refusal(error) from error


def _refusal(error: Exception) -> BackendError:
    broken = type(error) is Exception or isinstance(error, _BROKEN)
    return (StartLostError if broken and _is_servers(error) else BackendError)(_brief(error))


def _is_servers(error: BaseException) -> bool:
    """Whether it was raised there, and handed on here: with where it was, or as a plain exception
    where SkyPilot's client does not know its type, like that of a database or a cloud."""
    return hasattr(error, "stacktrace") or type(error) is Exception


@contextmanager
def _shown_managed() -> Generator[None]:
    with _environment:
        before = os.environ.get(_SHOW_MANAGED)
        os.environ[_SHOW_MANAGED] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_SHOW_MANAGED]
            else:
                os.environ[_SHOW_MANAGED] = before


def _job(record: Any) -> Job:
    task = record.task_name or record.job_name or ""
    return Job(
        job_id=record.job_id,
        name=record.job_name or "",
        task=task,
        status=record.status.value if record.status else "",
        submitted=record.submitted_at is not None,
        started=record.start_at is not None,
        # SkyPilot names it so, and says so nowhere.
        cluster=f"{task}-{record.job_id}",
        place=_place(record.cloud, record.region, record.accelerators),
        reason=record.failure_reason or "",
    )


def _cluster(record: Any) -> Cluster:
    # The record itself has its accelerators as text for people; not every handle has them.
    resources = getattr(record.handle, "launched_resources", None)
    accelerators = resources.accelerators if resources is not None else None
    place = _place(record.cloud, record.region, accelerators)
    return Cluster(record.name, record.status.value, record.is_managed, place)


def _place(
    cloud: str | None, region: str | None, accelerators: Mapping[str, float] | None
) -> Place | None:
    if not cloud or cloud == _NOWHERE:
        return None
    found = "".join(f"{name}:{count:g}" for name, count in (accelerators or {}).items())
    return Place(cloud.lower(), region or "", found)


def _brief(error: BaseException) -> str:
    # It may repeat the task that it is about.
    text = redact(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:500]}"
