"""The tiny policy's input and output, token by token."""

import json

import numpy as np
import pytest

from flotilla_environments.api import ENV_KEYS, open_instance
from flotilla_environments.name_lists import LISTS
from flotilla_environments.task_generator import make_data_id
from flotilla_environments.tiny_policy.demonstrations import prompt_ids
from flotilla_environments.tiny_policy.tokenizer import MARKUP_TOKENS
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import OK, Reply, ToolCall

NAMES = sorted({name for names in LISTS.values() for name in names})
CONTEXTS = {
    "in a prompt": "Book a room for {} in time.",
    "at the start of a prompt": "{} wants something",
    "before a full stop": "Close it for {}.",
    "in an argument": '<tool_call>\n{{"name": "f", "arguments": {{"guest": "{}"}}}}\n</tool_call>',
    "in a result": '<tool_response>\n[{{"id": 12, "city": "{}", "price": 3}}]\n</tool_response>',
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_name_is_the_same_single_token_everywhere(
    tokenizer: TransformersTokenizer, context: str
) -> None:
    for name in NAMES:
        alone = tokenizer.encode(name)
        assert len(alone) == 1, name
        assert tokenizer.encode(context.format(name)).count(alone[0]) == 1, name


def test_an_id_is_one_token_everywhere(tokenizer: TransformersTokenizer) -> None:
    for number in range(10, 100):
        [token] = tokenizer.encode(str(number))
        assert token in tokenizer.encode(f'[{{"id": {number}, "status": "open"}}]')
        assert token in tokenizer.encode(f'{{"issue_id": {number}}}}}\n')


def test_any_text_survives_the_way_to_tokens_and_back(tokenizer: TransformersTokenizer) -> None:
    text = '<|im_start|>user\nCafé 1234 "日本" \t\n</tool_response><done><|im_end|>'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markup_is_one_token_and_no_control_token(tokenizer: TransformersTokenizer) -> None:
    assert all(len(tokenizer.encode(token)) == 1 for token in MARKUP_TOKENS)
    assert set(tokenizer.control_tokens) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_the_prompt_names_each_tool_on_one_line(
    tokenizer: TransformersTokenizer, dialect: TemplateDialect
) -> None:
    instance = open_instance("shop", make_data_id("demo", 0))
    ids = prompt_ids(dialect, instance.scenario, instance.tools())
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\n"
        "Tools:\n"
        "find_customer(name)\n"
        "find_item(item)\n"
        "create_order(customer_id, item_id, quantity)<|im_end|>\n"
        "<|im_start|>user\n"
        "Today is 2026-07-13. When a date has no year, assume the current or a future year.\n"
        "Logged in user ID: robin@flotilla.test\n"
        "Logged in as: Robin\n\n"
        f"{instance.scenario.prompt}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_a_prompt_is_short(dialect: TemplateDialect, env_key: str) -> None:
    instance = open_instance(env_key, make_data_id("demo", 0))
    assert len(prompt_ids(dialect, instance.scenario, instance.tools())) < 120


@pytest.mark.parametrize("observations", [["[]"], ['{"ok": true}', '{"error": "not found"}']])
def test_tokens_appended_turn_by_turn_equal_the_whole_conversation(
    tokenizer: TransformersTokenizer, dialect: TemplateDialect, observations: list[str]
) -> None:
    question = {"role": "user", "content": "Close the crash issue in core."}
    turn = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    whole = [
        question,
        {"role": "assistant", "content": turn},
        *({"role": "tool", "content": text} for text in observations),
    ]
    start = tokenizer.encode(tokenizer.apply_chat_template([question], None, True))
    written = [*tokenizer.encode(turn), dialect.stop_ids[0]]
    replies = [Reply(ToolCall("f", "{}"), OK, [text]) for text in observations]
    seen = dialect.bridge_ids(np.array(start), written, replies, ())
    assert start + written + seen == tokenizer.encode(
        tokenizer.apply_chat_template(whole, None, True)
    )


def test_structured_tool_calls_are_rendered_as_the_policy_writes_them(
    tokenizer: TransformersTokenizer,
) -> None:
    call = {"name": "find_item", "arguments": {"item": "tea"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    text = tokenizer.apply_chat_template([message], None, False)
    written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert text == f"<|im_start|>assistant\n{written}<|im_end|>\n"
