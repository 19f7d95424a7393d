"""One session with an OpenEnv server: its tools, steps, rewards and grade."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.adapters.openenv import codec
from flotilla_env_gateway.adapters.openenv.wire import OpenEnvChannel, OpenEnvError
from flotilla_env_gateway.config.openenv import OpenEnvConfig
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Instance,
    Part,
    Submission,
    Text,
    Tool,
)
from flotilla_env_gateway.verify.check_report import Returned


class OpenEnvInstance(Instance):
    """A session that has been reset to its task."""

    env_version = ""
    no_database = "an OpenEnv server shows no database; it grades by its rewards"
    regrades = False

    def __init__(
        self,
        forget_channel: Callable[[str, OpenEnvChannel], None],
        config: OpenEnvConfig,
        channel: OpenEnvChannel,
        task: Task,
        action: Mapping[str, Any],
        start: Mapping[str, Any],
        instance_id: str,
    ) -> None:
        self.instance_id = instance_id
        self.data_version = task.data_version
        self._forget_channel = forget_channel
        self._config = config
        self._channel = channel
        self._start = start
        self._action = action
        self._calls_tools = config.actions == "tools" or (
            config.actions == "auto" and codec.takes_tool_calls(action)
        )
        self._tools: Sequence[Tool] = ()
        self._submits = False
        # Of steps only: the reward of `reset` is the default of an observation.
        self._rewards: list[float] = []
        self._done = start.get("done") is True
        self._stdout = ""
        self._returned = Returned(None)

    @property
    def end_reason(self) -> str | None:
        """The reason why the session ended before its episode. An environment that is done may
        close the session, because its rewards are known."""
        over = self._done or self._channel.is_open
        return None if over else "the session ended before its episode"

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        """List the tools except the one that ends the episode, which grading calls."""
        if self._tools:
            return self._tools
        if not self._calls_tools:
            await self._channel.send_request("state", None, timeout_s=timeout_s)
            step = partial(codec.make_step_tool, self._config.step_tool, self._action)
            self._tools = [await run_aside_for(self._action, step)]
            return self._tools
        data = await self._channel.send_request("step", {"type": "list_tools"}, timeout_s=timeout_s)
        read_only = self._config.read_only_tools
        tools = await run_aside_for(data, lambda: codec.parse_tools(data, read_only))
        self._tools = [tool for tool in tools if tool.name != self._config.submit_tool]
        self._submits = len(self._tools) < len(tools)
        return self._tools

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        fields, images = self._config.first_observation, self._config.image_fields
        return await run_aside_for(
            self._start, lambda: codec.parse_observation(self._start, fields, images)
        )

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult:
        try:
            data = await self._send_step(self._make_action(name, arguments), timeout_s)
        except OpenEnvError as refusal:
            return self._handle_refusal(refusal)
        return await run_aside_for(
            data, lambda: codec.parse_call_result(data, self._config.image_fields)
        )

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        """Grade by the environment's rewards; the task's own verifier is not run."""
        if self._config.reward == "verifier":
            return None
        if self._submits and not self._done:
            try:
                await self._submit_answer(submission.final_answer, timeout_s)
            except BackendError as error:
                if error.is_refusal:
                    raise
                lost, timed_out = error.lost, error.kind == "timeout"
                return Execution(error=str(error), instance_lost=lost, timed_out=timed_out)
        if self.end_reason is not None:
            return Execution(error=self.end_reason, instance_lost=True)
        if not self._rewards:
            return Execution(error="the environment gave no reward")
        total = self._rewards[-1] if self._config.reward == "last" else sum(self._rewards)
        report, rewards = self._returned.report, self._returned.rewards
        return Execution(result=total, report=report, stdout=self._stdout, rewards=rewards)

    async def close(self, *, timeout_s: float) -> None:
        await self._channel.close(timeout_s=timeout_s)
        self._forget_channel(self.instance_id, self._channel)

    async def _submit_answer(self, final_answer: str | None, timeout_s: float) -> None:
        tool = self._config.submit_tool
        arguments = {self._config.submit_argument: final_answer}
        data = await self._send_step(self._make_action(tool, arguments), timeout_s)
        self._stdout, self._returned = codec.parse_stdout(data), codec.parse_report(data)
        result = await run_aside_for(data, lambda: codec.parse_call_result(data, ()))
        if result.is_error:
            shown = "; ".join(part.text for part in result.parts if isinstance(part, Text))
            raise BackendError("refused", f"{tool} failed: {shown}", delivered=True)

    async def _send_step(self, action: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        data = await self._channel.send_request("step", action, timeout_s=timeout_s)
        if (reward := codec.parse_reward(data)) is not None:
            self._rewards.append(reward)
        self._done = self._done or data.get("done") is True
        return data

    def _make_action(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._calls_tools:
            return arguments
        return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}

    def _handle_refusal(self, refusal: OpenEnvError) -> CallResult:
        if refusal.code == "EXECUTION_ERROR" or (
            # A tool call is well formed: the failed validation is the tool's own.
            refusal.code == "VALIDATION_ERROR" and self._calls_tools
        ):
            return CallResult((Text(refusal.message),), is_error=True)
        refusal.bad_arguments = refusal.code == "VALIDATION_ERROR"
        raise refusal
