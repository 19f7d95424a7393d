"""The backend that plays a recorded run in place of every environment."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from flotilla_common.domain.attempts import Grade, NoGradeReason, ToolOutcome
from flotilla_env_gateway.adapters.replay import record_format as form
from flotilla_env_gateway.adapters.replay.player import Player
from flotilla_env_gateway.adapters.replay.recorded_run import MissError, RecordedRun
from flotilla_env_gateway.config.backends import ReplayConfig
from flotilla_env_gateway.ports import (
    Backend,
    BackendError,
    CallAnswer,
    CallResult,
    Instance,
    Part,
    PolicyCall,
    ProvisionRequest,
    Submission,
    Text,
    Tool,
)

_MISS = NoGradeReason.REPLAY_MISS


class ReplayInstance(Instance):
    """One episode of the recorded run."""

    regrades = False

    def __init__(self, request: ProvisionRequest, run: RecordedRun, player: Player) -> None:
        self.instance_id = f"replay-{request.episode_id}"
        self.env_version = player.opening["env_version"]
        self.data_version = player.opening["data_version"]
        self._run = run
        self._player = player
        self._listed: Any = player.opening["tools"]
        self._changed: Callable[[], None] = lambda: None
        self._ended: str | None = None

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        return await self._decode(lambda: form.decode_tools(self._listed, self._run.get_part))

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        shown = self._player.opening["shown"]
        return await self._decode(lambda: form.decode_parts(shown, self._run.get_part))

    async def _decode(self, decode: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(decode)
        except MissError as error:
            raise _as_backend_error(error) from error

    def watch_tools(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tell_events()

    async def settle_call(
        self, call: PolicyCall, answer: Callable[[], Awaitable[CallAnswer]]
    ) -> CallAnswer:
        key = await asyncio.to_thread(lambda: form.as_key(form.identify_call(call)))
        try:
            result = self._player.play_step(form.CALL, key, call.seq).result
            found = await asyncio.to_thread(form.decode_answer, result, self._run.get_part)
        except MissError as error:
            # Also of a part.
            self._player.missed = str(error)
            return CallAnswer(ToolOutcome.REPLAY_MISS, (Text(str(error)),))
        self._tell_events()
        return found

    async def settle_grade(
        self, submission: Submission, grade: Callable[[], Awaitable[Grade]]
    ) -> Grade:
        key = await asyncio.to_thread(lambda: form.as_key(form.identify_grade(submission)))
        try:
            return form.decode_grade(self._player.play_step(form.GRADE, key).result)
        except MissError as error:
            return Grade(reason=_MISS, detail=str(error), attempts=0)

    def _tell_events(self) -> None:
        for step in self._player.reach_events():
            if step.op == form.LOST:
                self._ended = step.result
            else:
                self._listed = step.result
                self._changed()

    @property
    def end_reason(self) -> str | None:
        return self._ended

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        raise BackendError(_MISS, "a recording makes no calls", delivered=False, invalid=True)

    async def close(self, *, timeout_s: float) -> None:
        return None


class ReplayBackend(Backend):
    """The recorded run as the source of all instances."""

    def __init__(self, config: ReplayConfig) -> None:
        """Raises ConfigError if the run was not recorded."""
        self._run = RecordedRun(config.run)

    async def provision_instance(self, request: ProvisionRequest, *, timeout_s: float) -> Instance:
        try:
            player = Player(await asyncio.to_thread(self._run.read_episodes, request))
        except MissError as error:
            raise _as_backend_error(error) from error
        if not player.is_open:
            kind, _, message = player.opening["failure"].partition(": ")
            raise BackendError(kind, message, delivered=False, invalid=True)
        return ReplayInstance(request, self._run, player)

    async def close(self) -> None:
        return None


def _as_backend_error(error: MissError) -> BackendError:
    return BackendError(_MISS, str(error), delivered=False, invalid=True)
