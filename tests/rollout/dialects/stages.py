"""A family's dialect on its tokenizer, ready to be played."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.types import PromptFacts
from tests.rollout.dialects.families import FAMILIES, Family
from tests.rollout.dialects.native_calls import TOOLS, Case
from tests.rollout.dialects.native_turns import TASK, NativeWriter

FACTS = PromptFacts(TASK, "", {})


def make_tokenizer(family: Family) -> TransformersTokenizer:
    """Return the tokenizer of a family with its template and, for `template`, the options."""
    options = family.options if family.dialect == "template" else {}
    special = {"bos_token": family.begin, "eos_token": family.ends[0]}
    return TransformersTokenizer(family.make_tokenizer(), {**special, **options})


class Stage:
    """One family, with the prompt of an episode."""

    def __init__(self, family: Family) -> None:
        own = family.dialect == "template"
        self.family = family
        self.tokenizer = make_tokenizer(family)
        config = DialectConfig(
            name=family.dialect,
            options={} if own else dict(family.options),
            parser=family.parser if own else "",
            own_prompt=family.own_prompt,
        )
        self.dialect = choose_dialect(family.models[0], self.tokenizer, config)
        self.writer = NativeWriter(family, self.tokenizer.fast)
        self.prompt_ids = np.array(self.dialect.prompt_ids(FACTS, TOOLS), np.int32)
        self.prompt = self.tokenizer.decode(self.prompt_ids.tolist())

    def write(self, case: Case) -> str:
        """Return a turn as the family's template spells it."""
        return self.writer.write(case, TOOLS, self.prompt)

    def play(self, case: Case) -> tuple[list[int], Turn]:
        """Return the ids of a native turn, and what the dialect reads."""
        ids = self.writer.encode(self.write(case))
        return ids, self.read(ids)

    def read(self, ids: Sequence[int]) -> Turn:
        return self.dialect.parse_turn(self.prompt_ids, ids, TOOLS)


@cache
def stage_of(name: str) -> Stage:
    return Stage(next(family for family in FAMILIES if family.name == name))


def calls_of(turn: Turn) -> list[Any]:
    """Return calls as pairs, and errors as their messages."""
    return [
        item.message
        if isinstance(item, ParseError)
        else (item.name, json.loads(item.arguments_json))
        for item in turn.items
    ]


def executed(turn: Turn) -> list[ToolCall]:
    return [item for item in turn.items if isinstance(item, ToolCall)]
