"""What playing an episode needs: an environment behind an env_gateway."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class PlayError(Exception):
    """An episode cannot be played on: its environment does not open, or was lost. It says nothing
    about the task, unless it is a `task_fault`: the environment refused what the task says.
    `timed_out` if the time was not enough."""

    def __init__(self, message: str, *, timed_out: bool = False, task_fault: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.task_fault = task_fault


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool, with the JSON schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, Any]
    read_only: bool
    idempotent: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode begins with. `task` is the first message, as a policy is sent it; it has the
    prompt, the facts of the environment and its first observation. `regrades` if the episode can
    be graded again."""

    prompt: str
    task: str
    observation: str
    tools: tuple[OfferedTool, ...]
    regrades: bool = False


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answer to a call. `outcome` is that of the gateway's contract, in small letters: "ok",
    "tool_error". `done` if the environment ended the episode."""

    outcome: str
    text: str
    done: bool


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of an episode: a reward, or the reason why there is none. `printed` is the
    verifier's output, `failed` the checks that it returned as failed; `verifier_fault` is set if
    the verifier itself is the reason."""

    reward: float | None
    no_grade: str = ""
    detail: str = ""
    printed: str = ""
    verifier_fault: bool = False
    failed: tuple[str, ...] = ()


class OpenEpisode(Protocol):
    """An episode that is held open."""

    @property
    def opening(self) -> Opening: ...

    async def call_tool(self, name: str, arguments: str) -> CallResult:
        """Call a tool; `arguments` are a JSON object. Raises PlayError."""
        ...

    async def grade(
        self, answer: str | None, messages: Sequence[Mapping[str, Any]], *, again: bool = False
    ) -> Grade:
        """Grade the episode by a final answer and the conversation, in OpenAI's messages. The first
        grade is final, unless the verifier is to run `again` on the same state. Raises
        PlayError."""
        ...


class EpisodePlayer(Protocol):
    """Opens episodes of tasks, which are closed at the end of the context, come what may."""

    def open_episode(self, task: Mapping[str, Any]) -> AbstractAsyncContextManager[OpenEpisode]:
        """Open one. Raises PlayError."""
        ...
