"""The course of somebody's own tools: its words and drills are made of their demonstrations."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flotilla_common.episodes.conversations import Conversation, SaidCall, SaidTurn
from flotilla_common.tasks.task_files import read_tasks
from flotilla_environments.tiny_policy.build import Recipe, build
from flotilla_environments.tiny_policy.courses import Course
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.drills import DONE_WORD, leaves_of, make_drills, words_of
from flotilla_environments.tiny_policy.model import Shape
from flotilla_environments.tiny_policy.train import Example, Schedule
from flotilla_reading.demonstrations.conversation_files import FileConversations
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import OK, Reply, ToolCall
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

# Probability that the player of the last lesson gives up before a call. Beyond a half, its clone
# never makes one when it acts greedily.
LAZY = 0.55
# Every so manieth drill is of the last lesson.
LAST_LESSON = 4
DRILLS, VOCABULARY, MOST_TOKENS = 3_200, 4_000, 8_192
_PROMPT = "QUESTION"


def build_for_tools(
    out: Path,
    demonstrations: Path,
    tasks: Sequence[Path],
    recipe: Recipe,
    progress: Callable[[str, int, int], None],
) -> bool:
    """Build a policy for the tools of these demonstrations, with the words of these tasks' prompts;
    return False if it is up to date.

    Raises BuildError, ConversationFileError, TaskFileError, and ValueError if no demonstration
    calls a tool."""
    found = [each for each in FileConversations(demonstrations, 0.0).read() if each is not None]
    prompts = [each.task.prompt for path in tasks for each in read_tasks(path)]
    digest = hashlib.sha256()
    for path in (demonstrations, *tasks):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    course = make_course(found, prompts)
    return build(out, replace(recipe, files=digest.hexdigest()), progress, course)


def recipe_for_tools(seed: int) -> Recipe:
    """Return the recipe of such a policy."""
    return Recipe(
        seed,
        course="own tools",
        demonstrations=DRILLS,
        vocab_size=VOCABULARY,
        shape=Shape(feed_forward=128, max_positions=MOST_TOKENS, rope_theta=1e6, induces=True),
        habits=Habits(lazy={}, sloppy=0.0),
        # Copying is learnt sooner where nobody gives up.
        basics=Schedule(400, 8),
        schedule=Schedule(60, 8, learning_rate=3e-3),
        repeats_basics=False,
    )


def make_course(conversations: Sequence[Conversation], prompts: Sequence[str]) -> Course:
    """Return the course of these demonstrations, in which all words of `prompts` are known."""
    arguments = [
        json.loads(call.arguments)
        for each in conversations
        for turn in each.turns
        for call in turn.calls
    ]
    words = words_of([*prompts, *leaves_of(arguments)])

    def make(
        count: int, *, first: int, habits: Habits, rng: random.Random
    ) -> Iterator[tuple[Conversation, bool]]:
        last = count // LAST_LESSON
        for lazy, drills in ((0.0, count - last), (LAZY, last)):
            for drill in islice(make_drills(conversations, words, lazy, rng), drills):
                yield drill, not lazy

    def tokenise(
        drill: tuple[Conversation, bool], dialect: TemplateDialect, tokenizer: Tokenizer
    ) -> Example:
        return replace(tokenise_conversation(drill[0], dialect, tokenizer), basic=drill[1])

    return Course(
        lambda: _texts_of(conversations, prompts),
        make,
        tokenise,
        lambda tokenizer: _measure_lengths(conversations, prompts, tokenizer),
    )


def tokenise_conversation(
    conversation: Conversation, dialect: TemplateDialect, tokenizer: Tokenizer
) -> Example:
    """Return a conversation as a rollout would record it, token by token.

    `flotilla_rollout.rendering` does so for any chat template; this one for ours, faster."""
    ids = _encode_prompt(conversation, dialect, tokenizer)
    trained = [False] * len(ids)
    for turn in conversation.turns:
        written = [*tokenizer.encode(_write_turn(turn)), dialect.stop_ids[0]]
        seen: list[int] = []
        if turn is not conversation.turns[-1]:
            replies = [
                Reply(ToolCall(call.name, call.arguments), reply.outcome or OK, [reply.text])
                for call, reply in zip(turn.calls, turn.replies, strict=True)
            ]
            seen = dialect.bridge_ids(np.array(ids, np.int32), written, replies, ())
        ids += written + seen
        trained += [True] * len(written) + [False] * len(seen)
    return Example(ids, trained)


def _encode_prompt(
    conversation: Conversation, dialect: TemplateDialect, tokenizer: Tokenizer
) -> list[int]:
    tools, prompt = msgspec.json.encode(conversation.tools), conversation.prompt
    if any(mark in prompt for mark in tokenizer.structure_tokens):
        # The dialect sees to it that words of a user stay words.
        return dialect.prompt_ids(PromptFacts(prompt, "", {}), _read_tools(tools))
    head, tail = _text_around(dialect, tokenizer, tools)
    return tokenizer.encode(f"{head}{prompt}{tail}")


def _read_tools(tools_json: bytes) -> list[Tool]:
    functions = [each["function"] for each in msgspec.json.decode(tools_json)]
    return [Tool(each["name"], each["description"], each["parameters"]) for each in functions]


@lru_cache(64)
def _text_around(
    dialect: TemplateDialect, tokenizer: Tokenizer, tools_json: bytes
) -> tuple[str, str]:
    """Return what stands before and after the words of a user."""
    tools = _read_tools(tools_json)
    text = tokenizer.decode(dialect.prompt_ids(PromptFacts(_PROMPT, "", {}), tools))
    head, _, tail = text.rpartition(_PROMPT)
    return head, tail


def _write_turn(turn: SaidTurn) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {_rewrite(call)}}}\n</tool_call>'
        for call in turn.calls
    ]
    return "\n".join([*([turn.content] if turn.content else []), *calls])


def _rewrite(call: SaidCall) -> str:
    """Return the arguments of a call as the chat template writes them."""
    return json.dumps(json.loads(call.arguments), ensure_ascii=False)


def _texts_of(conversations: Sequence[Conversation], prompts: Sequence[str]) -> Iterator[str]:
    """Yield what the policy reads and writes: the tokenizer has a token for each word of it."""
    yield "Tools:\nsystem\nuser\nassistant\n"
    yield from ('{"error": "no tool call found"}', DONE_WORD)
    yield from prompts
    for each in conversations:
        yield each.prompt
        yield from (_write_tool(tool["function"]) for tool in each.tools)
        for turn in each.turns:
            yield _write_turn(turn)
            yield from (f"\n{reply.text}\n" for reply in turn.replies)


def _write_tool(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"


def _measure_lengths(
    conversations: Sequence[Conversation], prompts: Sequence[str], tokenizer: Tokenizer
) -> dict[str, int]:
    """Return the tokens of the longest first prompt, demonstration, and turn of one."""
    dialect = TemplateDialect(tokenizer)
    asked = [
        msgspec.structs.replace(each, prompt=prompt, turns=())
        for each in conversations[:1]
        for prompt in prompts
    ]
    turns = [_write_turn(turn) for each in conversations for turn in each.turns]

    def longest(found: Sequence[Conversation]) -> int:
        return max(len(tokenise_conversation(each, dialect, tokenizer).ids) for each in found)

    return {
        "longest_prompt": longest(asked),
        "longest_demonstration": longest(conversations),
        "most_turns": max(len(each.turns) for each in conversations),
        "longest_turn": 1 + max(len(tokenizer.encode(turn)) for turn in turns),
    }
