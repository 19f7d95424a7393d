"""Whatever a task, a tool or its result says, it is data: it neither ends a turn nor starts one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.episodes.prompt import Profile, PromptBuilder
from services.rollout.types import PromptFacts, Tool
from tests.support.rollout import tokenizer

TOKENIZER = tokenizer()
CONTROL = set(TOKENIZER.encode("".join(TOKENIZER.control_tokens)))
PIECES = [*TOKENIZER.control_tokens, "<|", "im_", "end", "start", "|>", "\0", "\x1b[31m", "\u202e"]
DATA = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)
BUILDERS: dict[Profile, PromptBuilder] = {
    "minimal": PromptBuilder(TOKENIZER, "minimal"),
    "full": PromptBuilder(TOKENIZER, "full"),
}


def control_ids(ids: list[int]) -> list[int]:
    return [token for token in ids if token in CONTROL]


@pytest.mark.parametrize("profile", ["minimal", "full"])
@given(task=DATA, told=DATA, result=DATA)
@settings(max_examples=40, deadline=None)
def test_data_never_reads_as_a_control_token(
    profile: Profile, task: str, told: str, result: str
) -> None:
    builder = BUILDERS[profile]

    def tool(words: str) -> Tool:
        schema = {"type": "object", "properties": {f"at{words}": {"description": words}}}
        return Tool(f"look{words}", words, schema)

    def prompt(text: str, offered: Tool) -> list[int]:
        return builder.prompt_ids(PromptFacts(text, "2026-01-01", {"WHO": text}), [offered])

    assert control_ids(prompt(task, tool(told))) == control_ids(prompt("x", tool("")))
    shown = builder.observation_ids([builder.observation_text("ok", [result])])
    assert control_ids(shown) == control_ids(builder.observation_ids(["x"]))
