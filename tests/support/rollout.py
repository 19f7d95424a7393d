"""A tokenizer, and environments without a gateway, for tests of the loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Literal

from flotilla_common.domain.attempts import AttemptKey, Grade, ToolOutcome
from flotilla_common.domain.policy import PolicyId
from flotilla_environments.tiny_policy.tokenizer import train_tokenizer
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.fake import FakeEngine, Script
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.episodes.episode import Attempt, AttemptRunner
from flotilla_rollout.ports import Dialect, Environment, EnvironmentLost
from flotilla_rollout.types import EpisodeInfo, OpenRequest, PromptFacts, Sampling, Tool, ToolResult

POLICY = PolicyId(1, 3, b"f" * 32)
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
FACTS = PromptFacts("Find it.", "", {})
PASSED = Grade(1.0)
OK = ToolResult(ToolOutcome.OK, ('{"found": 1}',))


@cache
def tokenizer() -> TransformersTokenizer:
    corpus = ["system user assistant Tools look at name arguments Find it error found done"]
    return TransformersTokenizer(train_tokenizer(corpus * 3, 300))


def dialect(name: Literal["template", "full"] = "template") -> Dialect:
    return choose_dialect("", tokenizer(), DialectConfig(name=name))


def limits(**changes: Any) -> AttemptLimits:
    values: dict[str, Any] = {
        "max_turns": 4,
        "max_input_length": 2000,
        "max_generate_length": 200,
        "max_model_len": 4000,
        "attempt_timeout_s": 5.0,
        "call_timeout_s": 2.0,
        "grade_timeout_s": 0.5,
    }
    return AttemptLimits(**{**values, **changes})


def attempt(index: int = 0, budget_s: float = 10.0) -> Attempt:
    return Attempt(AttemptKey("g", index, 0), '{"key": "t"}', Sampling(1.0, 7), 1, budget_s)


def turns(*texts: str) -> Script:
    """A policy that writes these texts, one a turn, and repeats the last; one that was cut it
    takes up where it was."""

    def write(text: str) -> str:
        begun = text.split("<|im_start|>assistant\n")
        return texts[min(len(begun) - 2, len(texts) - 1)].removeprefix(begun[-1])

    return write


class FakeEpisode:
    """Answers with `answer(name, arguments_json)` and remembers everything."""

    def __init__(
        self,
        answer: Callable[[str, str], ToolResult],
        grade: Grade,
        tools: tuple[Tool, ...] = (TOOL,),
    ) -> None:
        self.info = EpisodeInfo("e", tools, FACTS, instance_id="i", transcript_bytes=2**24)
        self.calls: list[tuple[str, str]] = []
        self.grades: list[tuple[str | None, bytes]] = []
        self.closed = False
        self._answer = answer
        self._grade = grade

    async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> ToolResult:
        self.calls.append((name, arguments_json))
        return self._answer(name, arguments_json)

    async def request_grade(
        self, final_answer: str | None, transcript: bytes, timeout_s: float
    ) -> Grade:
        assert not self.closed
        self.grades.append((final_answer, transcript))
        return self._grade


class FakeEnvironment:
    """Opens FakeEpisodes, or is lost."""

    def __init__(
        self,
        answer: Callable[[str, str], ToolResult] = lambda name, arguments: OK,
        grade: Grade = PASSED,
        lost: str = "",
        open_seconds: float = 0.0,
        tools: tuple[Tool, ...] = (TOOL,),
        episode: type[FakeEpisode] = FakeEpisode,
    ) -> None:
        self._episode = episode
        self._open_seconds = open_seconds
        self._tools = tools
        self.episodes: list[FakeEpisode] = []
        self._answer = answer
        self._grade = grade
        self._lost = lost

    @asynccontextmanager
    async def open_episode(self, request: OpenRequest) -> AsyncGenerator[FakeEpisode]:
        if self._lost:
            raise EnvironmentLost(self._lost)
        await asyncio.sleep(self._open_seconds)
        episode = self._episode(self._answer, self._grade, self._tools)
        self.episodes.append(episode)
        try:
            yield episode
        finally:
            episode.closed = True


def engine(script: Script, seconds: float = 0.0) -> FakeEngine:
    return FakeEngine(tokenizer(), dialect().stop_ids[0], script, seconds=seconds, policy=POLICY)


def runner(
    environment: Environment,
    texts: Sequence[str],
    *,
    name: Literal["template", "full"] = "template",
    seconds: float = 0.0,
    **changes: Any,
) -> AttemptRunner:
    fake = engine(turns(*texts), seconds)
    return AttemptRunner(fake, environment, tokenizer(), dialect(name), limits(**changes))
