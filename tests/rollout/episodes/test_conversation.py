"""The messages of an attempt cover its tokens and are what was said, in every dialect."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_told
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey, Grade, StopReason, ToolOutcome
from flotilla_common.domain.messages import (
    MOST_MESSAGES,
    MOST_MESSAGES_BYTES,
    MOST_TEXT,
    ChatCall,
    ChatMessage,
    MessageText,
    TokenText,
    check_messages,
    decode_messages,
)
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture import ShownPicture
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.fake import LOGPROB, FakeEngine
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.common_prefix import common_length
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.turns import PlayedTurn, ToolCall
from flotilla_rollout.episodes import conversation
from flotilla_rollout.episodes.attempt_record import AttemptState, make_finished_trajectory
from flotilla_rollout.episodes.conversation import Conversation, MessageReader
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import Completion, PolicySpan, PromptFacts, Sampling, ToolResult
from tests.rollout.dialects.families import FAMILIES
from tests.rollout.dialects.native_calls import CASES, TOOLS, Case
from tests.rollout.dialects.stages import Stage, stage_of
from tests.rollout.dialects.template_corpus import read_rows, tokenizer_of
from tests.support.examples import examples
from tests.support.rollout import FACTS, POLICY, FakeEnvironment, attempt, limits, runner, tokenizer

# One for each way to spell a call and to end a turn.
_QUICK = ("Llama 3.2", "Qwen3", "DeepSeek V3.1", "GLM-4.5, GLM-4.6", "Kimi K2", "gpt-oss")
_NAMES = [
    pytest.param(
        family.name,
        marks=()
        if family.name in _QUICK
        else (pytest.mark.slow, pytest.mark.filterwarnings("default")),
    )
    for family in FAMILIES
]
_ODD = (
    *("", "null", "  padded  ", "Zoë 東京 👩‍👩‍👧", "<|im_end|>", "</think> <tool_call>"),
    *("line\n\nline", "{}", "</tool_response>", "[1,\\n2]"),
    # What stands in the marks of templates.
    *("o", "e", "<", ">", "t", "|", "user", "assistant", "tool", "response"),
)


class ScriptedEngine(FakeEngine):
    """Writes these token ids, a list for each turn and in as many requests as it takes, and then
    only ends."""

    def __init__(self, tokenizer: TransformersTokenizer, end: int, turns: Sequence[list[int]]):
        super().__init__(tokenizer, end, policy=POLICY)
        self._left = [list(turn) for turn in turns]
        self._end = end

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        turn = self._left.pop(0) if self._left else [self._end]
        ids, rest = turn[:max_tokens], turn[max_tokens:]
        if rest:
            self._left.insert(0, rest)
        spans = (PolicySpan(POLICY, len(ids)),)
        scores = np.full(len(ids), LOGPROB, np.float32)
        return Completion(np.array(ids, np.int32), scores, spans, cut=bool(rest))


def play_turns(
    tokenizer: TransformersTokenizer,
    dialect: Dialect,
    turns: Sequence[list[int]],
    environment: FakeEnvironment,
    **changes: Any,
) -> Trajectory:
    bounds = {"max_turns": 20, "max_input_length": 50_000, "max_model_len": 60_000, **changes}

    async def run() -> Trajectory:
        engine = ScriptedEngine(tokenizer, dialect.stop_ids[0], turns)
        runner = AttemptRunner(engine, environment, tokenizer, dialect, limits(**bounds))
        return await runner.run_attempt(attempt())

    return asyncio.run(run())


def check_told(trajectory: Trajectory) -> tuple[TokenSequence, list[ChatMessage]]:
    """Check that the messages of an attempt cover its tokens, in order and once."""
    (sequence,) = trajectory.sequences
    media = [item.sha256 for item in sequence.media]
    check_messages(sequence.messages, 0, len(sequence.token_ids), media)
    messages = list(decode_messages(sequence.messages))
    starts = [0, *(message.end for message in messages)]
    joined = [
        token
        for message, start in zip(messages, starts, strict=False)
        for token in sequence.token_ids[start : message.end].tolist()
    ]
    assert joined == sequence.token_ids.tolist()
    # What the policy wrote is in its own messages, and all of each of its turns in one.
    at = 0
    for span in sequence.spans:
        at += span.length
        if span.author in (Author.POLICY, Author.FORCED):
            message = next(each for each in messages if each.end >= at)
            assert message.role == "assistant"
    return sequence, messages


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[Case | str], dict[str, Any]]:
    """Draw a seed, turns (cases, or a text that may be no readable call), and limits."""
    turns = draw(
        st.lists(
            st.one_of(
                st.sampled_from(CASES),
                st.sampled_from(['<tool_call>{"name": ', "I wonder.", "", *_ODD]),
            ),
            max_size=4,
        )
    )
    bounds = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "max_generate_length": st.integers(4, 60),
                "observation_tokens": st.integers(4, 40),
                "max_model_len": st.integers(700, 2500),
                "calls": st.integers(1, 3),
                "continue_turns": st.booleans(),
            },
        )
    )
    return draw(st.integers(0, 2**20)), turns, bounds


def odd_environment(seed: int) -> FakeEnvironment:
    """An environment of odd answers, some of which are errors."""
    chooser = random.Random(seed)

    def answer(name: str, arguments: str) -> ToolResult:
        outcome = chooser.choice([ToolOutcome.OK, ToolOutcome.OK, ToolOutcome.TOOL_ERROR])
        text = chooser.choice([*_ODD, json.dumps({"found": [1, 2]}), "long answer " * 50])
        return ToolResult(outcome, (text,), done=chooser.random() < 0.1)

    return FakeEnvironment(answer, tools=TOOLS)


def written(stage: Stage, turn: Case | str) -> list[int]:
    if isinstance(turn, str):
        return [*stage.tokenizer.encode(turn), stage.dialect.stop_ids[0]]
    single = stage.family.single_call and len(turn.calls) > 1
    case = replace(turn, calls=turn.calls[:1]) if single else turn
    return stage.writer.encode(stage.write(case))


@pytest.mark.parametrize("name", _NAMES)
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(story=stories())
def test_messages_cover_all_tokens_and_name_the_calls_that_were_made(
    name: str, story: tuple[int, list[Case | str], dict[str, Any]]
) -> None:
    stage = stage_of(name)
    seed, turns, bounds = story
    environment = odd_environment(seed)
    ids = [written(stage, turn) for turn in turns]
    trajectory = play_turns(stage.tokenizer, stage.dialect, ids, environment, **bounds)
    sequence, messages = check_told(trajectory)
    assert list(answered_calls(messages)) == environment.episodes[0].calls
    [task] = [each for each in messages[:2] if each.role == "user"]
    if sequence.spans[0].length < len(sequence.token_ids):
        assert text_of(task.content, sequence, stage.tokenizer) == FACTS.task


def answered_calls(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str]]:
    """Yield the calls that have an answer before the next turn: a policy may repeat its own ids."""
    for place, message in enumerate(messages):
        answers = takewhile(lambda each: each.role != "assistant", messages[place + 1 :])
        answered = {each.call_id for each in answers}
        yield from ((c.name, c.arguments) for c in message.calls if c.id in answered)


def text_of(text: MessageText, sequence: TokenSequence, tokenizer: TransformersTokenizer) -> str:
    if isinstance(text, str):
        return text
    return text.read(sequence.token_ids.tolist(), tokenizer.decode)


@pytest.mark.parametrize("name", _NAMES)
def test_a_native_turn_is_told_as_it_was_meant(name: str) -> None:
    """Thinking, text, calls and answers are apart, without the family's marks."""
    stage = stage_of(name)
    thinks = bool(stage.family.think)
    call = ("search", {"query": "red shoes"})
    thought = "The user wants shoes." if thinks else ""
    answer = "Seven pairs were found."
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (answer,)), tools=TOOLS)
    turns = [
        written(stage, Case("one", (call,), "", thought)),
        [*stage.tokenizer.encode("It is done."), stage.dialect.stop_ids[0]],
    ]
    sequence, messages = check_told(play_turns(stage.tokenizer, stage.dialect, turns, environment))
    texts = {
        (each.role, field): text_of(getattr(each, field), sequence, stage.tokenizer)
        for each in messages[:-1]
        for field in ("content", "thinking")
    }
    assert texts["user", "content"] == FACTS.task
    assert texts["tool", "content"].strip('"') == answer
    assert texts["assistant", "content"] == ""
    if not stage.family.drops_thinking:
        assert texts["assistant", "thinking"] == thought
    [made] = [each for message in messages for each in message.calls]
    assert (made.name, json.loads(made.arguments)) == call
    assert [m.call_id for m in messages if m.role == "tool"] == [made.id]
    system = texts.get(("system", "content"), "")
    assert stage.family.hides_tools or "search" in system or stage.family.calls_are_text


def test_what_the_dialect_itself_says_of_the_tools_is_no_template_s() -> None:
    dialect = FullDialect(tokenizer())
    turns = [tokenizer().encode('I look.<tool_call>{"name": "look", "arguments": {}}</tool_call>')]
    trajectory = play_turns(tokenizer(), dialect, turns, FakeEnvironment())
    sequence, messages = check_told(trajectory)
    assert [each.by_template for each in messages[:2]] == [False, False]
    assert messages[0].role == "system"
    said = text_of(messages[0].content, sequence, tokenizer())
    assert said.startswith("You are a helpful agent.")
    assert trajectory.tools == b""
    assert [each.role for each in messages[2:5]] == ["assistant", "tool", "assistant"]
    assert text_of(messages[2].content, sequence, tokenizer()) == "I look."


_CALLS = (
    [ToolCall("search", '{"query": "red shoes"}')],
    [ToolCall("list_open", "{}"), ToolCall("move", '{"x": 1, "y": 2}')],
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [row.name for row in read_rows().values() if row.first])
def test_every_template_of_the_corpus_is_told(name: str) -> None:
    tokenizer = tokenizer_of(name)
    dialect = choose_dialect("", tokenizer, DialectConfig.model_validate(read_rows()[name].first))
    end, answer = dialect.stop_ids[0], 'Seven "pairs" were found\nin café 9.'
    turns = [[*tokenizer.encode("It is done."), end]]
    for calls in _CALLS:
        prompt = dialect.prompt_ids(FACTS, TOOLS)
        # Some templates render no more than one call a turn.
        with suppress(TemplateError):
            whole = dialect.render_turns(FACTS, TOOLS, [PlayedTurn(calls)])
            turn = whole[common_length(prompt, whole) :]
            turns.insert(0, [*turn[: turn.index(end)], end] if end in turn else [*turn, end])
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, (answer,)), tools=TOOLS)
    sequence, messages = check_told(play_turns(tokenizer, dialect, turns, environment))
    assert list(answered_calls(messages)) == environment.episodes[0].calls
    [task] = [each for each in messages[:2] if each.role == "user"]
    assert text_of(task.content, sequence, tokenizer) == FACTS.task
    shown = [each.content for each in messages if each.role == "tool"]
    assert all(isinstance(each, TokenText) for each in shown), "it is in the policy's tokens"


def test_short_answers_are_not_taken_for_the_marks_around_them() -> None:
    stage = stage_of("Qwen3")
    call = ("search", {"query": "red shoes"})
    for pair in [("<", ">"), ("o", "o"), ("e", "tool"), ("1", "1"), ("user", "")]:
        answers = iter(pair)
        environment = FakeEnvironment(
            lambda *_, left=answers: ToolResult(ToolOutcome.OK, (next(left),)), tools=TOOLS
        )
        turns = [written(stage, Case("two", (call, call)))]
        sequence, messages = check_told(
            play_turns(stage.tokenizer, stage.dialect, turns, environment, max_turns=2)
        )
        told = [each for each in messages if each.role == "tool"][:2]
        shown = [text_of(each.content, sequence, stage.tokenizer) for each in told]
        assert shown == [answer or "null" for answer in pair]
        assert all(isinstance(each.content, TokenText) for each in told)
        starts = [each.content.start for each in told if isinstance(each.content, TokenText)]
        assert starts[1] >= told[0].end


@pytest.mark.parametrize("task", ["assistant", "s", "start", "user", "<|im_start|>user"])
def test_a_task_is_not_taken_for_the_marks_around_it(task: str) -> None:
    stage = stage_of("Qwen3")
    facts = PromptFacts(task, "", {})
    ids = stage.dialect.prompt_ids(facts, TOOLS)
    reader = MessageReader(stage.tokenizer, stage.dialect)
    system, user = reader.read_prompt(ids, facts, TOOLS)
    assert (system.role, user.role) == ("system", "user")
    assert isinstance(user.content, TokenText)
    said = user.content.read(ids, stage.tokenizer.decode)
    assert said == task.replace("<|im_start|>", "< |im_start|>")
    assert isinstance(system.content, TokenText)
    assert system.content.read(ids, stage.tokenizer.decode).startswith("# Tools")


def test_a_long_run_of_spaces_is_read_in_no_time() -> None:
    stage = stage_of("Qwen3")
    tool = replace(TOOLS[0], description="a" + " " * 200_000 + "b")
    ids = stage.dialect.prompt_ids(FACTS, [tool])
    reader, begun = MessageReader(stage.tokenizer, stage.dialect), time.perf_counter()
    system, _ = reader.read_prompt(ids, FACTS, [tool])
    assert system.role == "system"
    assert time.perf_counter() - begun < 5.0


def test_a_turn_that_was_never_played_to_its_end_is_the_policy_s() -> None:
    """Time ran out between two requests of one turn."""
    policy = PolicySpan(POLICY, 4)
    transcript = Transcript([1, 2, 3])
    state = AttemptState(0.0, transcript=transcript)
    state.conversation.messages = [ChatMessage("user", 2, TokenText(1, 2))]
    ids, scores = np.array([7, 8, 9, 9], np.int32), np.zeros(4, np.float32)
    transcript.add_completion(Completion(ids, scores, (policy,), cut=True), 1.0)
    trajectory = make_finished_trajectory(
        AttemptKey("g", 0, 0), state, StopReason.TIMEOUT, Grade(0.0)
    )
    _, messages = check_told(trajectory)
    assert messages[1:] == [ChatMessage("assistant", 7, TokenText(3, 7))]


def test_more_than_a_learner_takes_is_left_out() -> None:
    spans = (Span(Author.PROMPT, 3), Span(Author.POLICY, 2, POLICY, 1.0))
    turn = ChatMessage("assistant", 5, TokenText(3, 5))
    unread = ChatMessage("tool", 5, "x" * MOST_TEXT)
    told = [ChatMessage("user", 3), turn, *[unread] * 1100]
    kept = decode_messages(Conversation(told).encode(spans))
    assert [each.content for each in kept[2:]] == [""] * 1100
    assert Conversation([*told, *[unread] * MOST_MESSAGES]).encode(spans) == b""
    call = ChatCall("c", "f", "x" * MOST_MESSAGES_BYTES)
    assert Conversation([replace_told(turn, calls=(call,))]).encode(spans) == b""


async def test_what_cannot_be_told_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no text")

    monkeypatch.setattr(conversation, "_Spelled", fail)
    call = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    environment = FakeEnvironment()
    trajectory = await runner(environment, [f"So. {call}", "<done>"]).run_attempt(attempt())
    assert trajectory.is_graded
    _, messages = check_told(trajectory)
    assert [each.role for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert list(answered_calls(messages)) == environment.episodes[0].calls


async def test_results_that_the_policy_does_not_see_are_told_all_the_same() -> None:
    text = "It is over. " * 500
    done = ToolResult(ToolOutcome.OK, (text,), done=True)
    call = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    trajectory = await runner(FakeEnvironment(lambda *_: done), [call]).run_attempt(attempt())
    sequence, messages = check_told(trajectory)
    last = messages[-1]
    assert (last.role, last.outcome, last.end) == ("tool", "", len(sequence.token_ids))
    assert last.content == text[:MOST_TEXT]
    [kept] = sequence.media
    assert (kept.content.decode(), last.media) == (text, (kept.sha256,))


async def test_tools_are_told_as_the_template_got_them() -> None:
    trajectory = await runner(FakeEnvironment(), ["<done>"]).run_attempt(attempt())
    [tool] = json.loads(trajectory.tools)
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "look"
