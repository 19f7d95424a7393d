"""One episode in FleetTaskEnv's terms, from its first observation to its grade."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_env_gateway.clients import fleet_shapes
from flotilla_env_gateway.clients.connection import GatewayError
from flotilla_env_gateway.clients.episode import EpisodeClient

_SUBMIT = "submit_final_answer"
_SUBMITTED = {"status": "submitted", "message": "Answer recorded. Ending session."}
SCREEN_MODALITIES = ("computer_use", "browser_use")
_ERROR_CHARS = 500

Observation = dict[str, Any]
StepResult = tuple[Observation, float | None, bool, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """Settings of an attempt. `call_timeout_s` bounds a tool call, and `grade_timeout_s` the
    grade."""

    prompt: str
    task_key: str
    modality: str
    max_steps: int
    call_timeout_s: float
    grade_timeout_s: float
    partial_reward: bool


class FleetAttempt:
    """One attempt at a task. Use it in the thread of the episode's connection, by one caller at a
    time."""

    def __init__(self, episode: EpisodeClient, settings: AttemptSettings) -> None:
        self.episode = episode
        self.done = False
        self.graded = False
        self.reward: float | None = None
        self.tool_errors: list[str] = []
        self.verifier_error: str | None = None
        self.verifier_stdout: str | None = None
        self._settings = settings
        self._step_count = 0
        self._answer: str | None = None
        self._tools = [
            fleet_shapes.to_openai_tool(tool.name, tool.description, tool.input_schema_json)
            for tool in episode.tools
        ]

    async def get_first_observation(self) -> Observation:
        observation = self._make_observation({})
        if self._settings.modality in SCREEN_MODALITIES:
            shown = await self.episode.get_first_observation()
            observation["initial_screenshot"] = fleet_shapes.to_tool_result(shown, is_error=False)
        return observation

    async def take_step(
        self, action: Mapping[str, Any], conversation: Sequence[Any] | None
    ) -> StepResult:
        """Execute an action. Raises RuntimeError once the episode is done."""
        if self.done:
            raise RuntimeError("Episode is done. Call reset() to start a new episode.")
        self._step_count += 1
        info: dict[str, Any] = {"step": self._step_count}
        result, over = await self._execute_action(action, info)
        info["done_reason"] = self._end_reason(action, over)
        self.done = info["done_reason"] is not None
        reward: float | None = 0.0
        if self.done:
            reward = await self.grade_episode(conversation)
            info["reward_computed"] = True
        return self._make_observation(result or {}), reward, self.done, info

    async def grade_episode(self, conversation: Sequence[Any] | None) -> float | None:
        """Grade the episode; return None if the grade is unknown. `verifier_error` then holds the
        reason."""
        self.graded = True
        timeout_s = self._settings.grade_timeout_s
        try:
            grade = await self.episode.grade_episode(self._answer, conversation, timeout_s)
        except GatewayError as error:
            self.verifier_error = str(error)
            return None
        self.verifier_stdout = grade.stdout or None
        self.reward = grade.reward
        if grade.reward is None:
            self.verifier_error = grade.no_grade
        elif grade.reward == 0.0:
            self.verifier_error = "the verifier ran and returned 0.0: the task is not done"
            if self._settings.partial_reward and grade.partial_reward is not None:
                self.reward = grade.partial_reward
        return self.reward

    async def _execute_action(
        self, action: Mapping[str, Any], info: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Call the action's tool, and record the outcome in `info`. Return the tool's result, and
        the reason if the episode is over."""
        name, params = action.get("tool"), action.get("params") or {}
        if not name:
            return None, None
        if name == _SUBMIT:
            self._answer = str(params.get("answer", ""))
            info["tool_result"] = dict(_SUBMITTED)
            info["submitted_answer"] = self._answer
            return dict(_SUBMITTED), "agent_done"
        answer = await self.episode.call_tool(name, params, self._settings.call_timeout_s)
        if answer.failure is not None:
            result, error = {"error": answer.failure}, answer.failure
        else:
            result = fleet_shapes.to_tool_result(answer.parts, is_error=answer.is_error)
            info["tool_result"] = result
            error = fleet_shapes.find_tool_error(result)
        if error is not None:
            info["tool_error"] = error
            self.tool_errors.append(f"{name}(): {error[:_ERROR_CHARS]}")
        return result, "env_done" if answer.done else None

    def _end_reason(self, action: Mapping[str, Any], over: str | None) -> str | None:
        if action.get("done", False):
            # An agent that declares itself done has answered, if only with an empty answer.
            self._answer = self._answer or ""
            return "agent_done"
        return over or ("max_steps" if self._step_count >= self._settings.max_steps else None)

    def _make_observation(self, observation: Any) -> Observation:
        return {
            "prompt": self._settings.prompt,
            "observation": observation,
            "step": self._step_count,
            "task_key": self._settings.task_key,
            "modality": self._settings.modality,
            "tools": self._tools,
        }
