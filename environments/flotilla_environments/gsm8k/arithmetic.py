"""Generated word problems in GSM8K's form: sums and differences of small numbers, as stories.

A problem is a pure function of split and index. The splits differ in their sums: those of `test`
(by SHA-256, 10 %) are in neither `train` nor `demo`, and the latter two share no index.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flotilla_environments.name_lists import FIRST

Split = Literal["train", "test", "demo"]

SPLITS: tuple[Split, ...] = ("train", "test", "demo")
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "keys", "nuts", "pens", "stones")
GAINS = ("buys {n} more", "finds {n} more", "gets {n} from {other}")
LOSSES = ("loses {n}", "gives {n} to {other}", "sells {n}")
QUESTION = "How many {things} does {name} have now?"
TEST_FRACTION = 0.10
SMALLEST, LARGEST = 1, 12
CHANGES = range(2, 7)


@dataclass(frozen=True)
class Step:
    """One line of working: `left` plus or minus `right`."""

    left: int
    operator: Literal["+", "-"]
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def text(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}"


@dataclass(frozen=True)
class Problem:
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """The working and, after "####", the answer."""
        return "".join(f"{step.text}\n" for step in self.steps) + f"#### {self.answer}"


def make_problem(split: Split, index: int) -> Problem:
    """Make a problem of two or three steps whose results stay between `SMALLEST` and `LARGEST`.

    No intermediate number equals the answer, nor does the last number of the story: a solution that
    stops early, or repeats the question, is never right."""
    rng = random.Random(f"arithmetic/{split}/{index}")
    while True:
        steps = _draw_steps(rng)
        early = {*(step.left for step in steps), steps[-1].right}
        if steps[-1].result not in early and _is_test(steps) == (split == "test"):
            return Problem(_tell_story(steps, rng), steps)


def make_rows(split: Split, count: int, start: int = 0) -> Iterator[dict[str, str]]:
    """Make problems in the columns of GSM8K."""
    for index in range(start, start + count):
        drawn = make_problem(split, index)
        yield {"question": drawn.question, "answer": drawn.solution}


def _draw_steps(rng: random.Random) -> tuple[Step, ...]:
    value = rng.randint(SMALLEST, LARGEST)
    steps: list[Step] = []
    for _ in range(rng.choice((2, 3))):
        possible = [
            step
            for operator in ("+", "-")
            for right in CHANGES
            if SMALLEST <= (step := Step(value, operator, right)).result <= LARGEST
        ]
        steps.append(rng.choice(possible))
        value = steps[-1].result
    return tuple(steps)


def _is_test(steps: tuple[Step, ...]) -> bool:
    digest = hashlib.sha256(" ".join(step.text for step in steps).encode()).digest()
    return int.from_bytes(digest[:8], "big") < TEST_FRACTION * 2**64


def _tell_story(steps: tuple[Step, ...], rng: random.Random) -> str:
    name, other = rng.sample(FIRST, 2)
    things = rng.choice(THINGS)
    sentences = [f"{name} has {steps[0].left} {things}."]
    for step in steps:
        event = rng.choice(GAINS if step.operator == "+" else LOSSES)
        sentences.append(f"{name} {event.format(n=step.right, other=other)}.")
    sentences.append(QUESTION.format(name=name, things=things))
    return " ".join(sentences)
