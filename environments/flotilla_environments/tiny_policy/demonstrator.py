"""A demonstrator that knows the right calls and often does not make them.

It is *lazy*: right before a write it may claim to be done. A clone of it gives up when it acts
greedily and sometimes does the work when it samples, which leaves room for reinforcement learning.
It is also a little *sloppy*: it may replace a decision by a plausible wrong one. Only whole
decisions go wrong, never a name or an id inside a right one: damaged arguments would teach the
clone not to copy.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flotilla_environments.api import ToolError, ToolSpec
from flotilla_environments.reference_policies import ids_in
from flotilla_environments.tiny_policy.tokenizer import DONE

MAX_SLOPPY_TURNS = 5


@dataclass(frozen=True)
class Habits:
    """Failure rates of a demonstrator: probabilities per write (or line of working, or click) by
    environment, and one per decision."""

    lazy: Mapping[str, float] = field(
        default_factory=lambda: {
            **{"booking": 0.5, "tracker": 0.5, "shop": 0.6},
            **{"arithmetic": 0.55, "screen": 0.7},
        }
    )
    sloppy: float = 0.06


@dataclass(frozen=True)
class Call:
    """Tool call; a `torn` one lacks the end of its JSON."""

    name: str
    arguments: Mapping[str, Any]
    torn: bool = False

    @property
    def text(self) -> str:
        """Text with which a policy makes this call."""
        body = json.dumps({"name": self.name, "arguments": dict(self.arguments)})
        return f"<tool_call>\n{body[:-2] if self.torn else body}\n</tool_call>"


@dataclass(frozen=True)
class Assignment:
    """Knowledge of a demonstrator: the right calls in order, and the words of the task."""

    env_key: str
    plan: Sequence[Call]
    words: Mapping[str, str | int]
    tools: Sequence[ToolSpec]


@dataclass(frozen=True)
class Turn:
    """One turn and its result: a JSON-able answer, an error, or nothing after the last turn."""

    text: str
    answer: Any = None
    error: str | None = None
    last: bool = False


@dataclass(frozen=True)
class _Situation:
    """Knowledge of a demonstrator at one decision."""

    expert: Call | None
    previous: Call | None
    seen_ids: Sequence[int]


def demonstrate(
    assignment: Assignment,
    call: Callable[[str, dict[str, Any]], Any],
    habits: Habits,
    rng: random.Random,
) -> list[Turn]:
    """Act by `call` until the demonstrator is done, or its call is torn."""
    turns: list[Turn] = []
    seen_ids: list[int] = []
    previous: Call | None = None
    remaining = list(assignment.plan)
    while True:
        situation = _Situation(remaining[0] if remaining else None, previous, seen_ids)
        action = _decide_call(assignment, situation, len(turns), habits, rng)
        if action is None or action.torn:
            turns.append(Turn(action.text if action else DONE, last=True))
            return turns
        turns.append(_take_turn(action, call))
        seen_ids += ids_in(turns[-1].answer)
        # After a wrong step, the script continues as if it had been right.
        del remaining[:1]
        previous = action


def _decide_call(
    assignment: Assignment,
    situation: _Situation,
    turns: int,
    habits: Habits,
    rng: random.Random,
) -> Call | None:
    """Return the next call, or None to end the task."""
    expert = situation.expert
    read_only = {tool.name for tool in assignment.tools if tool.read_only}
    is_write = expert is not None and expert.name not in read_only
    if is_write and rng.random() < habits.lazy[assignment.env_key]:
        return None
    if turns < MAX_SLOPPY_TURNS and rng.random() < habits.sloppy:
        return _wrong_call(assignment, situation, rng)
    return expert


def _wrong_call(assignment: Assignment, situation: _Situation, rng: random.Random) -> Call | None:
    """Return a wrong decision: give up, repeat the last call, tear the call, or another tool."""
    expert, previous = situation.expert, situation.previous
    draw = rng.random()
    if draw < 0.40 and expert is not None:
        return None
    if draw < 0.55 and previous is not None:
        return previous
    if draw < 0.70 and expert is not None:
        return Call(expert.name, expert.arguments, torn=True)
    others = [
        tool
        for tool in assignment.tools
        if (expert is None or tool.name != expert.name)
        and (situation.seen_ids or not any(map(_is_id, _parameter_names(tool))))
    ]
    if not others:
        return None
    tool = rng.choice(others)
    return Call(
        tool.name,
        {name: _draw_argument(name, assignment, situation, rng) for name in _parameter_names(tool)},
    )


def _draw_argument(
    name: str, assignment: Assignment, situation: _Situation, rng: random.Random
) -> str | int:
    """Return a value that the demonstrator has read: an id, or a word of the task."""
    if _is_id(name):
        return rng.choice(situation.seen_ids)
    if name in assignment.words:
        return assignment.words[name]
    if name == "quantity":
        return rng.randint(2, 9)
    return rng.choice([word for word in assignment.words.values() if isinstance(word, str)])


def _take_turn(action: Call, call: Callable[[str, dict[str, Any]], Any]) -> Turn:
    try:
        return Turn(action.text, answer=call(action.name, dict(action.arguments)))
    except ToolError as error:
        return Turn(action.text, error=str(error))


def _parameter_names(tool: ToolSpec) -> list[str]:
    return list(tool.parameters["properties"])


def _is_id(parameter: str) -> bool:
    return parameter.endswith("_id")
