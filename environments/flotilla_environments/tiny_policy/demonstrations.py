"""Demonstrations as data: tasks drawn, played on real instances, tokenised as real episodes."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flotilla_environments.api import ENV_KEYS, Instance, ToolError, ToolSpec, open_instance
from flotilla_environments.name_lists import LISTS
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import Scenario, make_data_id
from flotilla_environments.tiny_policy.demonstrator import (
    Assignment,
    Call,
    Habits,
    Turn,
    demonstrate,
)
from flotilla_environments.tiny_policy.train import Example
from flotilla_rollout.dialects.tagged_calls import parse_turn
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import OK, ParseError, Reply
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

TEXTS_PER_ENVIRONMENT = 300
CARELESS = Habits(lazy=dict.fromkeys(ENV_KEYS, 0.0), sloppy=0.3)


@dataclass(frozen=True)
class Demonstration:
    """Task and the turns that demonstrate it."""

    scenario: Scenario
    tools: Sequence[ToolSpec]
    turns: Sequence[Turn]


def make_assignment(instance: Instance) -> Assignment:
    """Collect what a demonstrator must know to solve the instance's task."""
    scenario = instance.scenario
    calls = [Call(*call) for call in plan_calls(scenario)]
    words = dict(scenario.slots)
    for call in calls:
        words |= {name: word for name, word in call.arguments.items() if name[-3:] != "_id"}
    return Assignment(scenario.env_key, calls, words, instance.tools())


def make_demonstrations(
    count: int, *, first: int, habits: Habits, rng: random.Random
) -> Iterator[Demonstration]:
    """Yield `count` demonstrations of the `demo` split from `first`, the environments in turn."""
    for number in range(count):
        env_key = ENV_KEYS[number % len(ENV_KEYS)]
        instance = open_instance(env_key, make_data_id("demo", first + number))
        assignment = make_assignment(instance)
        yield Demonstration(
            instance.scenario, assignment.tools, demonstrate(assignment, instance.call, habits, rng)
        )
        instance.close()


def vocabulary_texts() -> Iterator[str]:
    """Yield the texts for training the tokenizer: the same for every seed, with every name."""
    for names in LISTS.values():
        yield " ".join(names)
    yield "Tools:\nsystem\nuser\nassistant\n"
    yield '{"error": "no tool call found"}'
    for env_key in ENV_KEYS:
        yield from _tool_texts(open_instance(env_key, make_data_id("demo", 0)))
    count = TEXTS_PER_ENVIRONMENT * len(ENV_KEYS)
    for demonstration in make_demonstrations(count, first=0, habits=CARELESS, rng=random.Random(0)):
        yield _make_facts(demonstration.scenario).task
        for turn in demonstration.turns:
            yield turn.text
            yield f"\n{_answer_text(turn)}\n"
            yield from _complaints_about(turn.text)


def _tool_texts(instance: Instance) -> Iterator[str]:
    """Yield every tool's line in the prompt, and its errors for malformed calls."""
    for tool in instance.tools():
        parameters = list(tool.parameters["properties"])
        yield f"{tool.name}({', '.join(parameters)})"
        for arguments in ({}, dict.fromkeys(parameters), {**dict.fromkeys(parameters), "x": 0}):
            yield _refusal_text(instance, tool.name, arguments)


def _complaints_about(text: str) -> list[str]:
    """Return the policy's error messages for malformed calls."""
    return [item.message for item in parse_turn(text).items if isinstance(item, ParseError)]


def _refusal_text(instance: Instance, name: str, arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(instance.call(name, arguments))
    except ToolError as error:
        return json.dumps({"error": str(error)})


def prompt_ids(
    dialect: TemplateDialect, scenario: Scenario, tools: Sequence[ToolSpec]
) -> list[int]:
    """Return the initial prompt of a rollout of this task."""
    offered = [Tool(t.name, t.description, t.parameters, t.read_only) for t in tools]
    return dialect.prompt_ids(_make_facts(scenario), offered)


def _make_facts(scenario: Scenario) -> PromptFacts:
    """Return the facts as the gateway states them, with the date apart from other variables."""
    variables = dict(scenario.variables)
    date = variables.pop("CURRENT_DATE")
    return PromptFacts(scenario.prompt, date, variables)


def tokenize_episode(
    demonstration: Demonstration, dialect: TemplateDialect, tokenizer: Tokenizer
) -> Example:
    """Return the episode as a rollout would record it, token by token."""
    ids = prompt_ids(dialect, demonstration.scenario, demonstration.tools)
    policy = [False] * len(ids)
    for turn in demonstration.turns:
        written = [*tokenizer.encode(turn.text), dialect.stop_ids[0]]
        seen = (
            [] if turn.last else dialect.bridge_ids(np.array(ids), written, [_make_reply(turn)], ())
        )
        ids += written + seen
        policy += [True] * len(written) + [False] * len(seen)
    return Example(ids, policy)


def _make_reply(turn: Turn) -> Reply:
    """Make the reply to the turn's only call."""
    item = parse_turn(turn.text).items[0]
    if turn.error is not None:
        return Reply(item, "tool_error", [turn.error])
    return Reply(item, OK, [json.dumps(turn.answer)])


def _answer_text(turn: Turn) -> str:
    return json.dumps(turn.answer if turn.error is None else {"error": turn.error})
