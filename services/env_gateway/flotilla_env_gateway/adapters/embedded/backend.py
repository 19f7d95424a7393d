"""The environments of this repository, in worker processes of the gateway."""

from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_env_gateway.adapters.embedded.pool import EnvironmentWorker, WorkerPool
from flotilla_env_gateway.adapters.embedded.worker import decode_value
from flotilla_env_gateway.config.backends import EmbeddedConfig
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.ports import (
    BAD_TASK,
    Backend,
    BackendError,
    CallResult,
    Instance,
    Orphan,
    ProvisionRequest,
    QueryError,
    Rows,
    SqlValue,
    Text,
    Tool,
)
from flotilla_env_gateway.tools.computer_tool import make_media
from flotilla_environments import api


class EmbeddedInstance(Instance):
    """One app in a worker process, lost with its worker."""

    env_version = "v1"

    def __init__(
        self,
        backend: "EmbeddedBackend",
        worker: EnvironmentWorker,
        episode_id: str,
        data_version: str,
    ) -> None:
        self.instance_id = _instance_id(episode_id)
        self.data_version = data_version
        self._backend = backend
        self._worker = worker
        self._episode_id = episode_id

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        answer = await self._send_request("tools", timeout_s)
        return [Tool(**tool) for tool in answer["tools"]]

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        answer = await self._send_request("call", timeout_s, name=name, arguments=arguments)
        if (refusal := answer.get("refused")) is not None:
            return CallResult((Text(refusal),), is_error=True)
        if (png := answer.get("png")) is not None:
            return CallResult((make_media(decode_value(png), "image/png"),))
        return CallResult((Text(answer["text"]),))

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        answer = await self._send_request(
            "query", timeout_s, db=_check_database(db), sql=sql, args=list(args)
        )
        if (refusal := answer.get("refused")) is not None:
            raise QueryError(refusal)
        return await run_aside_for(answer, lambda: _rows(answer))

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        answer = await self._send_request("snapshot", timeout_s, db=_check_database(db))
        return await run_aside_for(answer, lambda: decode_value(answer["content"]))

    async def close(self, *, timeout_s: float) -> None:
        await self._backend.reclaim_orphan(Orphan(self._episode_id), timeout_s=timeout_s)

    @property
    def end_reason(self) -> str | None:
        return "its worker process has ended" if self._worker.ended else None

    async def is_alive(self, *, timeout_s: float) -> bool:
        return not self._worker.ended

    async def _send_request(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        message = {"op": op, "instance": self.instance_id, **fields}
        return await self._worker.send_request(message, timeout_s=timeout_s)


class EmbeddedBackend(Backend):
    """Backend of this repository's environments. Instances end with the process, so that a restart
    finds none to reclaim."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self.pool = WorkerPool(size=config.workers, hang_s=config.hang_s)
        # By episode, set before its instance is requested.
        self._placed: dict[str, EnvironmentWorker] = {}

    def serves_environment(self, env_key: str) -> bool:
        return env_key in api.ALL_KEYS

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> EmbeddedInstance:
        task = request.task
        data_version = task.data_version or "v1"
        worker = await self._place_episode(request.episode_id, timeout_s)
        message = {
            "op": "open",
            "instance": _instance_id(request.episode_id),
            "env_key": task.env_key,
            "data_id": task.data_key,
            "data_version": data_version,
        }
        try:
            answer = await worker.send_request(message, timeout_s=timeout_s)
        except BackendError as error:
            if error.lost:
                # An instance that is still being created loses nothing.
                raise BackendError("worker_ended", str(error), delivered=None) from error
            raise
        if (refusal := answer.get("refused")) is not None:
            self._forget_episode(request.episode_id)
            raise BackendError(BAD_TASK, refusal, delivered=False, invalid=True)
        return EmbeddedInstance(self, worker, request.episode_id, data_version)

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        """Delete the episode's instance. Instances of an ended process have ended too."""
        worker = self._placed.get(orphan.episode_id)
        if worker is None:
            return
        if not worker.ended:
            message = {"op": "close", "instance": _instance_id(orphan.episode_id)}
            try:
                await worker.send_request(message, timeout_s=timeout_s)
            except BackendError as error:
                if not error.lost:
                    raise
        self._forget_episode(orphan.episode_id)

    async def close(self) -> None:
        await self.pool.close()

    async def _place_episode(self, episode_id: str, timeout_s: float) -> EnvironmentWorker:
        """Return the worker of the episode; place a new episode on the worker with the most
        room."""
        placed = self._placed.get(episode_id)
        if placed is not None and not placed.ended:
            return placed
        worker = await self.pool.pick_worker(timeout_s)
        self._placed[episode_id] = worker
        worker.instances += 1
        return worker

    def _forget_episode(self, episode_id: str) -> None:
        worker = self._placed.pop(episode_id, None)
        if worker is not None:
            worker.instances -= 1


def _rows(answer: Mapping[str, Any]) -> Rows:
    rows = [[decode_value(value) for value in row] for row in answer["rows"]]
    return Rows(tuple(answer["columns"]), rows)


def _instance_id(episode_id: str) -> str:
    return f"embedded-{episode_id}"


def _check_database(name: str) -> str:
    if name not in api.DATABASES:
        raise QueryError(f"no database {name!r}: use 'seed' or 'current'")
    return name
