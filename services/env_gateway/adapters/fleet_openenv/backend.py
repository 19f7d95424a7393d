"""FleetTaskEnv itself, of Fleet's fork of OpenEnv, each in a worker process.

It is here to compare with: it retries calls that may have been executed, takes a verifier without a
result for a pass, and waits eight seconds before its first question. What it forgets, this does: it
tags its instances and deletes them.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from services.common.errors import ConfigError
from services.common.large_values import aside_of
from services.common.parsing import Limits, ParseError, parse_json_aside
from services.env_gateway.adapters.fleet.api import FleetApi
from services.env_gateway.adapters.fleet_openenv.codec import parts_of, task_config, tools_of
from services.env_gateway.adapters.fleet_openenv.process import WorkerProcess
from services.env_gateway.adapters.http_client import http_session
from services.env_gateway.adapters.server_address import connect, own_environment
from services.env_gateway.adapters.supervised_server import Address
from services.env_gateway.config.backends import FleetConfig, FleetOpenEnvConfig
from services.env_gateway.grading.verdict import reported
from services.env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Orphan,
    Part,
    Provision,
    QueryError,
    Rows,
    SqlValue,
    Submission,
    Tool,
)

PATH_VARIABLE = "OPENENV_FORK_PATH"
_WHERE = "env_gateway.backends.fleet_openenv"
_PACKAGE = Path("envs") / "fleet_env"
_CLOSE_S = 5.0
_CHECK_S = 5.0
# What Fleet's SDK raises for a request that can never succeed.
_INVALID = (
    "FleetAuthenticationError",
    "FleetBadRequestError",
    "FleetEnvironmentAccessError",
    "FleetEnvironmentNotFoundError",
    "FleetPermissionError",
    "FleetRegionError",
    "FleetVersionNotFoundError",
    "ImportError",
    "ModuleNotFoundError",
)
# A transcript as a worker may send it by default, and a part more.
_CONVERSATION = Limits(bytes=2**25, values=2**18)
_NO_SUCH_TOOL = "not found on any active MCP endpoint"


def build(config: FleetOpenEnvConfig, *, max_calls: int) -> "FleetOpenEnvBackend":
    """Raises ConfigError where the fork is not found."""
    folder = fork_folder(config)
    address, headers = connect(config, where=_WHERE)
    http = http_session(max_connections=max_calls, headers={})
    api = FleetApi(FleetConfig(), address, http, headers)
    return FleetOpenEnvBackend(config, folder, address, api)


def fork_folder(config: FleetOpenEnvConfig) -> Path:
    """The folder with `envs/fleet_env`, which is not on any package index."""
    given = config.path or os.environ.get(PATH_VARIABLE)
    if not given:
        raise ConfigError(
            f"backend 'fleet_openenv' needs Fleet's fork of OpenEnv: set {_WHERE}.path, or "
            f"{PATH_VARIABLE} in the environment, to a checkout of it"
        )
    for folder in (Path(given), Path(given) / "src"):
        if (folder / _PACKAGE).is_dir():
            return folder
    raise ConfigError(f"{given} holds neither {_PACKAGE} nor src/{_PACKAGE}; check {_WHERE}.path")


class FleetOpenEnvInstance:
    """Lost as soon as its process is: nobody else has FleetTaskEnv's state."""

    def __init__(
        self,
        api: FleetApi,
        worker: WorkerProcess,
        created: Mapping[str, Any],
        request: Provision,
    ) -> None:
        self.instance_id: str = created["instance_id"]
        self.env_version: str = created["env_version"]
        self.data_version: str = created["data_version"]
        self.pid = worker.pid
        self._api = api
        self._worker = worker
        self._tag = request.episode_id
        self._leases_browser = request.task.modality == "browser_use"
        self._first: Mapping[str, Any] | None = None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        first = await self._first_observation(timeout_s)
        return await aside_of(first, lambda: tools_of(first))

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        first = await self._first_observation(timeout_s)
        shown = first.get("initial_screenshot")
        return await aside_of(shown, lambda: parts_of(shown)) if shown else ()

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            return await self._call(name, arguments, timeout_s)
        except BackendError as error:
            # FleetTaskEnv does not tell an instance that has ended from one that only fails.
            if error.delivered is None and (why := await self._ended()):
                raise BackendError("lost", why, delivered=False, lost=True) from error
            raise

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        try:
            conversation = await parse_json_aside(submission.conversation or "null", _CONVERSATION)
        except ParseError as error:
            return Execution(error=f"the transcript cannot be read: {error}")
        message = {
            "op": "grade",
            "answer": submission.final_answer,
            "conversation": conversation,
        }
        try:
            answer = _checked(await self._worker.ask(message, timeout_s=timeout_s))
        except BackendError as error:
            if error.refused:
                raise
            timed_out = error.kind == "timeout"
            return Execution(error=str(error), timed_out=timed_out, instance_lost=error.lost)
        stdout = answer["stdout"] or ""
        score, report = reported(answer["returned"])
        if answer["reward"] is not None:
            return Execution(result=answer["reward"], report=report, stdout=stdout)
        why = await self._ended()
        if why is None and score is not None:
            # It gave no reward for what was printed; here it is known who may have written that.
            return Execution(result=score, report=report, stdout=stdout)
        error = why or answer["verifier_error"] or "no reward"
        return Execution(error=error, stdout=stdout, instance_lost=why is not None)

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        raise QueryError("FleetTaskEnv shows no database, and verifies at Fleet")

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        return None

    async def close(self, *, timeout_s: float) -> None:
        """By the tag: FleetTaskEnv repeats a creation of which it does not know the outcome."""
        if self._leases_browser and self._first is not None:
            await self._release_browser()
        await self._worker.kill()
        await self._api.delete_run(self._tag, timeout_s=timeout_s)

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        message = {"op": "step", "tool": name, "params": arguments}
        answer = _checked(await self._worker.ask(message, timeout_s=timeout_s))
        info = answer["info"]
        if "tool_result" in info:
            error = info.get("tool_error")
            parts = await aside_of(info, lambda: parts_of(info["tool_result"]))
            return CallResult(parts, error is not None, done=answer["done"])
        told = str(info.get("tool_error"))
        unknown = _NO_SUCH_TOOL in told
        raise BackendError(
            "fleet_task_env", told, delivered=False if unknown else None, invalid=unknown
        )

    async def _ended(self) -> str | None:
        """Why the instance is certainly gone; None when it runs, or nobody can say."""
        try:
            return await self._api.ended(self.instance_id, _CHECK_S)
        except BackendError:
            return None

    async def _release_browser(self) -> None:
        try:
            await self._worker.ask({"op": "close"}, timeout_s=_CLOSE_S)
        except BackendError:
            # The lease ends by itself; the instance must not wait for it.
            return

    async def _first_observation(self, timeout_s: float) -> Mapping[str, Any]:
        if self._first is None:
            answer = _checked(await self._worker.read(timeout_s=timeout_s))
            self._first = cast("Mapping[str, Any]", answer["observation"])
        return self._first


class FleetOpenEnvBackend:
    apart = True

    def __init__(
        self, config: FleetOpenEnvConfig, folder: Path, address: Address, api: FleetApi
    ) -> None:
        self._config = config
        self._address = address
        self._api = api
        worker = Path(__file__).with_name("worker.py")
        self._command = (config.python or sys.executable, str(worker), str(folder))

    def serves(self, env_key: str) -> bool:
        return True

    async def provision(self, request: Provision, *, timeout_s: float) -> FleetOpenEnvInstance:
        until = _now() + timeout_s
        environment = await self._environment(timeout_s)
        worker = await WorkerProcess.start(self._command, environment, self._config.answers)
        message = {
            "op": "open",
            "task": task_config(request.task),
            "tag": request.episode_id,
            "ttl_s": int(request.ttl_s) + 1,
        }
        try:
            created = _checked(await worker.ask(message, timeout_s=until - _now()))
        except BaseException:
            # Also when cancelled: a process that nobody knows of would go on creating.
            await worker.kill()
            raise
        return FleetOpenEnvInstance(self._api, worker, created, request)

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        await self._api.delete_run(orphan.episode_id, timeout_s=timeout_s)

    async def close(self) -> None:
        """Workers end with the instances, and with this process."""
        await self._api.http.close()
        await self._address.close()

    async def _environment(self, timeout_s: float) -> dict[str, str]:
        """FleetTaskEnv takes both from nowhere else."""
        url = await self._address.url(timeout_s)
        key = self._api.headers.get("authorization", "").removeprefix("Bearer ")
        # It refuses to start without a key, where the control plane asks for none.
        own = {"FLEET_BASE_URL": url, "FLEET_API_KEY": key or "none"}
        return {**own_environment(self._config, where=_WHERE), **own}


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Raises BackendError for what FleetTaskEnv raised. The process goes on."""
    if "kind" not in answer:
        return answer
    message = f"{answer['kind']}: {answer['error']}"
    raise BackendError(
        "fleet_task_env", message, delivered=None, invalid=answer["kind"] in _INVALID
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
