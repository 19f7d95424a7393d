"""Demonstrations of word problems, by a demonstrator that can add and mostly stops early.

Before each line of working but the first it may be *lazy* and answer with its intermediate result:
right in form, wrong in fact. A clone of it stops there when it acts greedily, and sometimes solves
the whole problem when it samples. It is also a little *sloppy*: it may skip a step, or use the
wrong operator.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flotilla_environments.gsm8k.arithmetic import (
    CHANGES,
    GAINS,
    LARGEST,
    LOSSES,
    QUESTION,
    SMALLEST,
    THINGS,
    Problem,
    Step,
    make_problem,
)
from flotilla_environments.name_lists import FIRST
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.train import Example
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts

ENV_KEY = "arithmetic"


@dataclass(frozen=True)
class Answered:
    """Problem and the demonstrator's answer."""

    problem: Problem
    text: str


def make_demonstrations(
    count: int, *, first: int, habits: Habits, rng: random.Random
) -> Iterator[Answered]:
    """Yield `count` answers to problems of the `demo` split from index `first`."""
    for index in range(first, first + count):
        drawn = make_problem("demo", index)
        yield Answered(drawn, _write_answer(drawn, habits, rng))


def _write_answer(drawn: Problem, habits: Habits, rng: random.Random) -> str:
    lines: list[str] = []
    value = drawn.steps[0].left
    for planned in drawn.steps:
        if lines and rng.random() < habits.lazy[ENV_KEY]:
            break
        step = Step(value, planned.operator, planned.right)
        if rng.random() < habits.sloppy:
            slipped = _wrong_step(step, rng)
            if slipped is None:
                continue
            step = slipped
        if not SMALLEST <= step.result <= LARGEST:
            # After a slip, the rest may lead to numbers that occur in no demonstration.
            break
        lines.append(f"{step.text}\n")
        value = step.result
    return "".join(lines) + f"#### {value}"


def _wrong_step(step: Step, rng: random.Random) -> Step | None:
    """Return a plausible wrong step: none at all, or the other operator."""
    if rng.random() < 0.5:
        return None
    return Step(step.left, "-" if step.operator == "+" else "+", step.right)


def vocabulary_texts() -> Iterator[str]:
    """Yield the texts for training the tokenizer: every word and number of the problems, for every
    seed."""
    yield " ".join(FIRST)
    yield "system\nuser\nassistant\n"
    for event in (*GAINS, *LOSSES, QUESTION):
        for things in THINGS:
            yield event.format(n=2, other=FIRST[0], name=FIRST[1], things=things)
    for value in range(SMALLEST, LARGEST + 1):
        for right in CHANGES:
            yield f"{Step(value, '+', right).text}\n{Step(value, '-', right).text}\n#### {value}"
    for index in range(300):
        drawn = make_problem("demo", index)
        yield drawn.question
        yield drawn.solution


def prompt_ids(dialect: TemplateDialect, problem: Problem) -> list[int]:
    """Return the initial prompt of a rollout of this problem."""
    facts = PromptFacts(prompt=problem.question, current_date="", variables={})
    return dialect.prompt_ids(facts, [])


def tokenize_episode(answered: Answered, dialect: TemplateDialect, tokenizer: Tokenizer) -> Example:
    """Return the episode as a rollout would record it, token by token."""
    prompt = prompt_ids(dialect, answered.problem)
    written = [*tokenizer.encode(answered.text), dialect.stop_ids[0]]
    return Example(prompt + written, [False] * len(prompt) + [True] * len(written))
