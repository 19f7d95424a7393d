"""SmolLM2, the real model that whole runs are tried with: its template knows no tools."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import write_call
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.dialects.turns import OK, Reply, ToolCall
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError
from tests.rollout.dialects.native_calls import CASES, TOOLS
from tests.rollout.dialects.stages import FACTS, executed
from tests.support.model_zoo import need_zoo


@cache
def tokenizer() -> TransformersTokenizer:
    return load_tokenizer(need_zoo("models/smollm2-135m"))


def dialect(name: str) -> Dialect:
    return choose_dialect("smollm2-135m", tokenizer(), DialectConfig(name=name))


def test_its_own_template_is_refused_since_it_leaves_out_calls() -> None:
    with pytest.raises(
        TemplateError, match="a call that the chat template writes is not read again"
    ):
        rehearse_dialect(dialect("template"), tokenizer())


def test_it_is_played_in_full_by_calls_that_are_executed_as_written() -> None:
    full = dialect("full")
    rehearse_dialect(full, tokenizer())
    prompt = np.array(full.prompt_ids(FACTS, TOOLS), np.int32)
    for case in CASES:
        calls: list[Any] = [ToolCall(name, json.dumps(given)) for name, given in case.calls]
        ids = tokenizer().encode("\n".join(map(write_call, calls)) + "<|im_end|>")
        turn = full.parse_turn(prompt, ids, TOOLS)
        assert [(call.name, json.loads(call.arguments_json)) for call in executed(turn)] == list(
            case.calls
        )
        replies = [Reply(call, OK, ["done"]) for call in executed(turn)]
        shown = tokenizer().decode(full.bridge_ids(prompt, ids, replies, TOOLS))
        assert shown.startswith("\n<|im_start|>user\nTool result:\ndone")
        assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
