"""A prompt is made once for all attempts that share it, without blocking the event loop."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla_common.domain.attempts import FailureKind, StopReason, ToolOutcome
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.episodes import prompt_cache
from flotilla_rollout.episodes.conversation import MessageReader
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.episodes.prompt_cache import PromptCache
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import (
    Completion,
    EpisodeInfo,
    PolicySpan,
    PromptFacts,
    Tool,
    ToolResult,
)
from tests.support.rollout import (
    FACTS,
    POLICY,
    TOOL,
    FakeEnvironment,
    FakeEpisode,
    attempt,
    limits,
    tokenizer,
)

LOOK = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
INFO = EpisodeInfo("e", (TOOL,), FACTS)
LARGE = replace(FACTS, prompt="Find it, look at name and user. " * 3000)


class CountingDialect(TemplateDialect):
    """A dialect that remembers the prompts it made; the first `failures` fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(tokenizer())
        self.made: list[str] = []
        # Threads that did so, and that rendered the text after a turn.
        self.made_in: set[int] = set()
        self.bridged_in: set[int] = set()
        self.begun = threading.Event()
        self._failures = failures

    def prompt_ids(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[int]:
        if facts.prompt.startswith("STANDIN"):
            # To find the task of a prompt in which it stands twice.
            return super().prompt_ids(facts, tools)
        self.made.append(facts.prompt)
        self.made_in.add(threading.get_ident())
        self.begun.set()
        if len(self.made) <= self._failures:
            raise TemplateError("it cannot")
        return super().prompt_ids(facts, tools)

    def bridge_ids(self, *given: Any, **named: Any) -> list[int]:
        self.bridged_in.add(threading.get_ident())
        return super().bridge_ids(*given, **named)


class OneWord(FakeEngine):
    """An engine that ends each turn at once, and reads nothing."""

    async def generate(self, *_: Any, **__: Any) -> Completion:
        ids = np.array([self._turn_end_id], np.int32)
        return Completion(ids, np.zeros(1, np.float32), (PolicySpan(POLICY, 1),), cut=False)


class LooksOnce(OneWord):
    """An engine that makes one call, and ends its second turn at once."""

    async def generate(self, *given: Any, **named: Any) -> Completion:
        end = await super().generate(*given, **named)
        if hasattr(self, "looked"):
            return end
        self.looked = True
        ids = np.array([*tokenizer().encode(LOOK), *end.token_ids], np.int32)
        spans = (PolicySpan(POLICY, len(ids)),)
        return Completion(ids, np.zeros(len(ids), np.float32), spans, cut=False)


class LargeEpisode(FakeEpisode):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.info = replace(self.info, facts=LARGE, tools=(replace(TOOL),))


def large_runner(dialect: CountingDialect) -> AttemptRunner:
    engine = OneWord(tokenizer(), dialect.stop_ids[0], policy=POLICY)
    room = limits(max_input_length=99_999, max_model_len=100_000)
    return AttemptRunner(engine, FakeEnvironment(episode=LargeEpisode), tokenizer(), dialect, room)


async def test_attempts_of_a_group_share_one_rendering_of_a_large_prompt() -> None:
    dialect = CountingDialect()
    run = large_runner(dialect)
    played = await asyncio.gather(*(run.run_attempt(attempt(index)) for index in range(8)))
    assert {each.stop_reason for each in played} == {StopReason.DONE}
    assert len(dialect.made) == 1
    (first, *others) = [each.sequences[0].token_ids for each in played]
    assert len(first) > 39_000
    assert all(np.array_equal(first, other) for other in others)
    assert len({each.facts.prompt_digest for each in played}) == 1


async def test_tools_that_a_server_lists_in_another_order_have_the_same_prompt() -> None:
    dialect = CountingDialect()
    prompts = PromptCache(dialect, MessageReader(tokenizer(), dialect))
    tools = (TOOL, replace(TOOL, name="another"))
    one = await prompts.get_prompt(replace(INFO, tools=tools))
    assert await prompts.get_prompt(replace(INFO, tools=tools[::-1])) is one
    fewer = await prompts.get_prompt(replace(INFO, tools=tools[:1]))
    assert fewer.tool_schema_digest != one.tool_schema_digest
    assert len(dialect.made) == 2


async def test_a_large_prompt_is_not_made_on_the_event_loop() -> None:
    """benchmarks/rollout_loop measures how long the loop is held: tests have no quiet machine."""
    dialect = CountingDialect()
    await large_runner(dialect).run_attempt(attempt())
    assert dialect.made_in and threading.get_ident() not in dialect.made_in


async def test_a_long_answer_of_a_tool_is_not_rendered_on_the_event_loop() -> None:
    dialect, answer = CountingDialect(), LARGE.prompt[:60_000]
    engine = LooksOnce(tokenizer(), dialect.stop_ids[0], policy=POLICY)
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (answer,)))
    room = limits(max_input_length=99_999, max_model_len=100_000)
    run = AttemptRunner(engine, environment, tokenizer(), dialect, room)
    assert (await run.run_attempt(attempt())).counts.turns == 2
    assert dialect.bridged_in and threading.get_ident() not in dialect.bridged_in


@pytest.mark.parametrize(
    "other",
    [
        replace(INFO, facts=replace(FACTS, prompt="Find that.")),
        replace(INFO, facts=replace(FACTS, current_date="2025-03-02")),
        replace(INFO, facts=replace(FACTS, variables={"REGION": "north"})),
        replace(INFO, facts=replace(FACTS, shown=("a page",))),
        replace(INFO, tools=()),
        replace(INFO, tools=(replace(TOOL, description="Looks well."),)),
        replace(INFO, tools=(replace(TOOL, parameters={"type": "object"}),)),
    ],
)
async def test_what_differs_in_anything_shown_is_rendered_by_itself(other: EpisodeInfo) -> None:
    dialect = CountingDialect()
    prompts = PromptCache(dialect, MessageReader(tokenizer(), dialect))
    first = await prompts.get_prompt(INFO)
    again = await prompts.get_prompt(replace(INFO, episode_id="f", facts=replace(FACTS)))
    await prompts.get_prompt(other)
    assert again is first
    assert len(dialect.made) == 2


async def test_prompts_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "MOST_PROMPTS", 2)
    dialect = CountingDialect()
    prompts = PromptCache(dialect, MessageReader(tokenizer(), dialect))
    for text in ("a", "b", "a", "c", "a", "b"):
        await prompts.get_prompt(replace(INFO, facts=replace(FACTS, prompt=text)))
    assert dialect.made == ["a", "b", "c", "b"]


async def test_a_prompt_that_cannot_be_rendered_fails_its_attempt_and_no_later_one() -> None:
    run = large_runner(CountingDialect(failures=1))
    assert (await run.run_attempt(attempt())).failure is FailureKind.TEMPLATE_ERROR
    assert (await run.run_attempt(attempt())).is_graded


async def test_an_attempt_that_is_cancelled_leaves_the_others_their_prompt() -> None:
    dialect = CountingDialect()
    prompts = PromptCache(dialect, MessageReader(tokenizer(), dialect))
    info = replace(INFO, facts=LARGE)
    requests = [asyncio.create_task(prompts.get_prompt(info)) for _ in range(3)]
    await asyncio.to_thread(dialect.begun.wait)
    requests[0].cancel()
    first, *others = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert others[0] is others[1]
    assert len(dialect.made) == 1
