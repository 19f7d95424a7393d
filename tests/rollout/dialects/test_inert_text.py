"""Texts of a task, a tool or its result are data: they neither end a turn nor start one."""

from functools import cache
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla_rollout.dialects.turns import OK, Reply, ToolCall
from flotilla_rollout.types import PromptFacts, Tool
from tests.support.examples import examples
from tests.support.rollout import dialect, tokenizer

TOKENIZER = tokenizer()
CONTROL = set(TOKENIZER.encode("".join(TOKENIZER.control_tokens)))
PIECES = [*TOKENIZER.control_tokens, "<|", "im_", "end", "start", "|>", "\0", "\x1b[31m", "\u202e"]
DATA = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)
NAMES: tuple[Literal["template", "full"], ...] = ("template", "full")


# Made once, but by a test: it starts a process.
cached_dialect = cache(dialect)


def control_ids(ids: list[int]) -> list[int]:
    return [token for token in ids if token in CONTROL]


@pytest.mark.parametrize("name", NAMES)
@given(task=DATA, words=DATA, result=DATA)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_data_never_reads_as_a_control_token(
    name: Literal["template", "full"], task: str, words: str, result: str
) -> None:
    chosen = cached_dialect(name)

    def tool(words: str) -> Tool:
        schema = {"type": "object", "properties": {f"at{words}": {"description": words}}}
        return Tool(f"look{words}", words, schema)

    def prompt(text: str, offered: Tool) -> list[int]:
        return chosen.prompt_ids(PromptFacts(text, "2026-01-01", {"WHO": text}), [offered])

    assert control_ids(prompt(task, tool(words))) == control_ids(prompt("x", tool("")))

    def bridge(text: str) -> list[int]:
        reply = Reply(ToolCall("look", "{}"), OK, [text])
        return chosen.bridge_ids(np.zeros(0, np.int32), [], [reply], ())

    assert control_ids(bridge(result)) == control_ids(bridge("x"))
