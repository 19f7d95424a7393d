"""FleetTaskEnv's shape over a gateway, for programs that were written for it.

    from flotilla_env_gateway.clients.fleet_task_env import make_fleet_task_env

    with make_fleet_task_env(task, gateway="127.0.0.1:7001", token=token) as env:
        observation = env.reset()
        observation, reward, done, info = env.step({"tool": "search", "params": {"q": "x"}})

Intentional differences: a reset opens a new instance instead of reusing one; close always closes; a
call that may have been executed is never sent twice; an unknown grade is None, even if a task has
no verifier; and the methods without `async` work inside a running event loop.
"""

import asyncio
import json
import os
import uuid
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_common.tasks.task_files import read_objects
from flotilla_env_gateway.clients.connection import (
    GatewayConnection,
    borrow_connection,
    load_gateway_tls,
    return_connection,
)
from flotilla_env_gateway.clients.episode import open_episode
from flotilla_env_gateway.clients.fleet_attempt import (
    SCREEN_MODALITIES,
    AttemptSettings,
    FleetAttempt,
    Observation,
    StepResult,
)

GATEWAY_VARIABLE = "FLOTILLA_GATEWAY"
TOKEN_VARIABLE = "FLOTILLA_TOKEN"
_RUN_ID = "fleet-task-env"

T = TypeVar("T")


class FleetTaskEnv:
    """One task; each `reset` starts a new attempt.

    `api_key` is accepted but not used: the gateway has its own. `ttl_seconds` bounds a whole
    episode (900, or 1800 for tasks on a screen), `request_timeout_s` each tool call, and
    `reset_timeout_s` the closing of the previous episode. `tls_dir`, or FLOTILLA_TLS, is for a
    gateway on another machine. The caller sets `conversation_messages` for verifiers that read the
    conversation.
    """

    def __init__(
        self,
        task_config: Mapping[str, Any],
        api_key: str | None = None,
        ttl_seconds: int | None = None,
        max_steps: int = 50,
        request_timeout_s: float = 60.0,
        reset_timeout_s: float = 10.0,
        partial_reward: bool = False,
        *,
        gateway: str | None = None,
        token: str | None = None,
        tls_dir: str | Path | None = None,
    ) -> None:
        self.task = dict(task_config)
        self.api_key = api_key
        self.ttl_seconds = ttl_seconds or _usual_ttl_s(self.modality)
        self.max_steps = max_steps
        self.request_timeout_s = request_timeout_s
        self.reset_timeout_s = reset_timeout_s
        self.partial_reward = partial_reward
        self.conversation_messages: list[dict[str, Any]] | None = None
        self._address = _require_setting(gateway, GATEWAY_VARIABLE, "gateway")
        self._token = _require_setting(token, TOKEN_VARIABLE, "token")
        self._tls = load_gateway_tls(self._address, tls_dir)
        self._group_id = f"{_RUN_ID}-{uuid.uuid4().hex}"
        self._tries = 0
        self._connection: GatewayConnection | None = None
        self._turn = asyncio.Lock()
        # The last episode is kept after its close.
        self._attempt: FleetAttempt | None = None
        self._open = False

    @property
    def task_key(self) -> str:
        return str(self.task.get("task_key") or self.task.get("key") or "unknown")

    @property
    def prompt(self) -> str:
        return str(self.task.get("prompt") or "")

    @property
    def modality(self) -> str:
        return str(self.task.get("task_modality") or "tool_use")

    @property
    def final_reward(self) -> float | None:
        """The grade of the last episode; None before there is one, or if it is unknown."""
        return self._attempt.reward if self._attempt else None

    @property
    def verifier_stdout(self) -> str | None:
        """The output of the last episode's verifier."""
        return self._attempt.verifier_stdout if self._attempt else None

    @property
    def verifier_error(self) -> str | None:
        """The reason why the grade of the last episode is 0, or unknown."""
        return self._attempt.verifier_error if self._attempt else None

    @property
    def tool_errors_list(self) -> list[str]:
        return list(self._attempt.tool_errors) if self._attempt else []

    def reset(self, seed: int | None = None) -> Observation:
        """Open a new episode. Raises GatewayError if no environment is available. `seed` is not
        used: tasks name their data."""
        return self._submit_work(self._open_attempt).result()

    async def reset_async(self, seed: int | None = None) -> Observation:
        return await asyncio.wrap_future(self._submit_work(self._open_attempt))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Execute `action`, which is {"tool", "params", "done"}, each optional. The reward is 0.0
        before the end, and None at the end if the grade is unknown."""
        return self._submit_work(lambda: self._step_attempt(action)).result()

    async def step_async(self, action: Mapping[str, Any]) -> StepResult:
        # A pending call is completed, so that its execution is never in doubt.
        work = self._submit_work(lambda: self._step_attempt(action))
        return await asyncio.shield(asyncio.wrap_future(work))

    def close(self) -> None:
        """Grade an unfinished episode into `final_reward`, and close it."""
        if self._connection is not None:
            try:
                self._submit_work(self._close_attempt).result()
            finally:
                self._return_connection()

    async def close_async(self) -> None:
        if self._connection is not None:
            closing = asyncio.wrap_future(self._submit_work(self._close_attempt))
            closing.add_done_callback(lambda _: self._return_connection())
            await asyncio.shield(closing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def from_json_file(cls, path: str | Path, task_key: str, **keywords: Any) -> Self:
        """Create an environment for the task with that key in a task file, of any form. Raises
        ValueError."""
        for task in read_objects(Path(path)):
            if task_key in (task.get("task_key"), task.get("key")):
                return cls(task, **keywords)
        raise ValueError(f"task {task_key!r} is not in {path}")

    @classmethod
    def from_json_file_all(cls, path: str | Path, **keywords: Any) -> list[Self]:
        return [cls(task, **keywords) for task in read_objects(Path(path))]

    def _submit_work(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run `work` in the thread of the connection, creating the connection if necessary."""
        if self._connection is None:
            self._connection = borrow_connection(self._address, self._token, self._tls)
            self._turn = asyncio.Lock()
        return self._connection.submit_coroutine(work())

    def _return_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            return_connection(connection)

    async def _open_attempt(self) -> Observation:
        connection = self._connection
        assert connection is not None, "made by _submit_work"
        async with self._turn:
            await self._leave_episode(self.reset_timeout_s)
            request = self._build_request(connection.worker_id)
            episode = await open_episode(connection, request, self.ttl_seconds)
            self._attempt = FleetAttempt(episode, self._make_settings())
            self._open = True
            # If this object is dropped without a close, its episode is closed anyway.
            self._dropped = weakref.finalize(self, connection.abandon_episode, episode.episode_id)
            return await self._attempt.get_first_observation()

    async def _step_attempt(self, action: Mapping[str, Any]) -> StepResult:
        async with self._turn:
            if self._attempt is None:
                raise RuntimeError("Environment not initialized. Call reset() first.")
            return await self._attempt.take_step(action, self.conversation_messages)

    async def _close_attempt(self) -> None:
        async with self._turn:
            try:
                if self._open and self._attempt is not None and not self._attempt.graded:
                    await self._attempt.grade_episode(self.conversation_messages)
            finally:
                await self._leave_episode(None)

    async def _leave_episode(self, timeout_s: float | None) -> None:
        """Close the open episode. If the close is not answered in time, the next episode replaces
        it, or it ends with its lease."""
        if self._attempt is None or not self._open:
            return
        self._open = False
        self._attempt.done = True
        self._dropped.detach()
        closing = asyncio.ensure_future(self._attempt.episode.close())
        await asyncio.wait({closing}, timeout=timeout_s)

    def _make_settings(self) -> AttemptSettings:
        return AttemptSettings(
            prompt=self.prompt,
            task_key=self.task_key,
            modality=self.modality,
            max_steps=self.max_steps,
            call_timeout_s=self.request_timeout_s,
            grade_timeout_s=self.ttl_seconds,
            partial_reward=self.partial_reward,
        )

    def _build_request(self, worker_id: str) -> pb.OpenEpisodeRequest:
        self._tries += 1
        # `try` is a Python keyword, so the field cannot be a keyword argument.
        fields: dict[str, Any] = {
            "request_id": uuid.uuid4().hex,
            "run_id": _RUN_ID,
            "group_id": self._group_id,
            "try": self._tries,
            "opening": 1,
            "task_json": json.dumps(self.task),
            "worker_id": worker_id,
            "budget": rpc.to_duration(self.ttl_seconds),
        }
        return pb.OpenEpisodeRequest(**fields)


def make_fleet_task_env(task_config: Mapping[str, Any], **keywords: Any) -> FleetTaskEnv:
    return FleetTaskEnv(task_config, **keywords)


def _usual_ttl_s(modality: str) -> int:
    return 1800 if modality in SCREEN_MODALITIES else 900


def _require_setting(given: str | None, variable: str, argument: str) -> str:
    value = given or os.environ.get(variable)
    if not value:
        raise ValueError(f"set {variable} in the environment, or pass {argument}=")
    return value
