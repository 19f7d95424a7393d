"""The ASGI application: one OpenEnv server per environment. Needs openenv, which needs mcp < 2."""
# The package is not in the environment that type checking uses.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    State,
)
from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Mount
from starlette.types import ASGIApp

from flotilla_environments import api
from flotilla_environments.openenv.episode import TASKS_PER_SPLIT, Choice, Episode, describe_task
from flotilla_environments.server.auth import BearerToken
from flotilla_environments.task_generator import SPLITS

_PREVIEW = 100


class TaskObservation(Observation):
    """Answer of `reset`."""

    prompt: str = Field(description="the task, in the user's words")
    task_key: str = Field(description="the task's name, which `reset` takes as well")
    env_variables: dict[str, str] = Field(description="the day, and who uses the tools")


class TaskState(State):
    """The episode's progress."""

    task_key: str = ""
    ended: bool = False


class Sessions:
    """Number of open environments, and its limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0


class AppEnvironment(Environment):
    """An app whose tools are called by `CallToolAction`, and whose tasks `reset` chooses.

    Calling `submit_final_answer` ends the episode, and its reward is the verifier's verdict on the
    final state; no other call has a reward.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env_key: str, sessions: Sessions) -> None:
        super().__init__()
        self._env_key = env_key
        self._sessions = sessions
        self._sessions.active += 1
        self._open = True
        self._episode: Episode | None = None
        self._state = TaskState(episode_id=None, step_count=0)

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_key: str = "",
        data_id: str = "",
        data_version: str = "",
        split: str = "",
        index: int | None = None,
    ) -> TaskObservation:
        self._check_open()
        choice = Choice(data_id, task_key, split, index, seed, data_version)
        episode = Episode(self._env_key, choice)
        self._end_episode()
        self._episode = episode
        self._state = TaskState(
            episode_id=episode_id or str(uuid4()), step_count=0, task_key=episode.task_key
        )
        scenario = episode.scenario
        return TaskObservation(
            prompt=scenario.prompt, task_key=episode.task_key, env_variables=scenario.variables
        )

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Tools finish in milliseconds, so that `timeout_s` is never reached."""
        self._check_open()
        if isinstance(action, ListToolsAction):
            return self._list_tools()
        if not isinstance(action, CallToolAction):
            raise TypeError(f"{type(action).__name__} is not a tool call")
        if self._episode is None:
            return _failed_observation(action, "there is no episode yet: reset starts one")
        self._state.step_count += 1
        try:
            value = self._episode.call(action.tool_name, action.arguments)
        except api.ToolError as error:
            return _failed_observation(action, str(error))
        observation = CallToolObservation(tool_name=action.tool_name, result=value)
        if (verdict := self._episode.verdict) is not None:
            self._state.ended = observation.done = True
            observation.reward = float(verdict.score)
            rewards = {} if verdict.rewards is None else {"rewards": verdict.rewards}
            checks = {"passed": verdict.passed, "failed": verdict.failed}
            observation.metadata = {**checks, **rewards}
        return observation

    @property
    def state(self) -> TaskState:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        description = f"The app {self._env_key!r}: tasks over a SQLite database, with its tools."
        return EnvironmentMetadata(name=self._env_key, description=description)

    def list_splits(self) -> list[str]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        return TASKS_PER_SPLIT if split in SPLITS else 0

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """List the first ones: the tasks of a split are generated on request."""
        return self.get_task_range(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return describe_task(self._env_key, split, index)

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        first = max(start or 0, 0)
        last = first + _PREVIEW if stop is None else min(stop, first + _PREVIEW)
        if split not in SPLITS:
            return []
        return [self.get_task(split, index) for index in range(first, last)]

    def close(self) -> None:
        self._end_episode()
        self._sessions.active -= self._open
        self._open = False

    def _check_open(self) -> None:
        # Ending an idle session leaves its WebSocket open, on top of a closed environment.
        if not self._open:
            raise RuntimeError("the session was idle for longer than --session-timeout: reconnect")

    def _list_tools(self) -> ListToolsObservation:
        episode = self._episode or Episode(self._env_key, Choice(split="train", index=0))
        specs = episode.tools()
        tools = [
            Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
            for spec in specs
        ]
        # OpenEnv's tools have no place for MCP's hints of how they behave.
        hints = {
            spec.name: {
                "readOnlyHint": spec.read_only,
                "idempotentHint": spec.idempotent,
                "destructiveHint": spec.destructive,
            }
            for spec in specs
        }
        return ListToolsObservation(tools=tools, metadata={"annotations": hints})

    def _end_episode(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None


def _failed_observation(action: Any, message: str) -> CallToolObservation:
    error = ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=message)
    return CallToolObservation(tool_name=action.tool_name, error=error)


def build_app(
    env_keys: Sequence[str],
    *,
    max_sessions: int,
    session_timeout_s: float,
    hosts: Sequence[str],
    token: str | None,
) -> ASGIApp:
    """Build the application: one environment at the root, or several at /ENV_KEY each.

    `session_timeout_s`: a session idle for longer is ended; otherwise the session of a vanished
    client would hold its place for ever. `hosts` are the accepted Host headers.
    """
    apps = {key: _build_server(key, max_sessions, session_timeout_s) for key in env_keys}
    app: ASGIApp = apps[env_keys[0]] if len(apps) == 1 else _mount_servers(apps)
    app = TrustedHostMiddleware(app, allowed_hosts=list(hosts))
    return BearerToken(app, token) if token else app


def _build_server(env_key: str, max_sessions: int, session_timeout_s: float) -> Any:
    sessions = Sessions(max_sessions)
    limits = ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=session_timeout_s)
    app = create_app(
        partial(AppEnvironment, env_key, sessions),
        CallToolAction,
        CallToolObservation,
        env_name=env_key,
        concurrency_config=limits,
        state_cls=TaskState,
        reset_observation_cls=TaskObservation,
    )
    # With FastAPI's own annotations this would need FastAPI here; a plain dict is enough.
    app.add_api_route("/sessions", lambda: {"active": sessions.active, "limit": sessions.limit})
    return app


def _mount_servers(apps: dict[str, Any]) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        # Starlette does not start mounted applications, which here end idle sessions.
        async with AsyncExitStack() as stack:
            for mounted in apps.values():
                await stack.enter_async_context(mounted.router.lifespan_context(mounted))
            yield

    routes = [Mount(f"/{env_key}", app) for env_key, app in apps.items()]
    return Starlette(routes=routes, lifespan=lifespan)
