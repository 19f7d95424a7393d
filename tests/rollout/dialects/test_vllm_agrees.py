"""vLLM's unmodified parsers read the same calls, as a second check of the corpus."""

import json
from typing import Any

import pytest

from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from tests.rollout.dialects.families import FAMILIES
from tests.rollout.dialects.native_calls import TOOLS, Case
from tests.rollout.dialects.native_turns import schema
from tests.rollout.dialects.stages import Stage, stage_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# A family, and the parser of vLLM for it.
_PARSERS = {
    "Llama 3.1, 3.3": "llama3_json",
    "Qwen2.5": "hermes",
    "Qwen3-2507": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "DeepSeek V3": "deepseek_v3",
    "DeepSeek V3.1": "deepseek_v31",
    "GLM-4.5, GLM-4.6": "glm45",
    "Kimi K2": "kimi_k2",
    "MiniMax M2": "minimax_m2",
    "Gemma 4": "gemma4",
    "Granite 4.0, 4.1": "granite4",
    "Hermes 3": "hermes",
    "Mistral Nemo": "mistral",
    "Devstral, Mistral Small 3.1": "mistral",
    "DeepSeek V4": "deepseek_v4",
}
# Cases that they read as other calls: they use text, and some read numbers as floats.
_LOOK_ALIKE = ("control tokens in", "ends of calls in", "ends of XML in", "a large integer")
# Gemma's parser takes the values in an object for texts.
_LOSSES = {"Gemma 4": ("an object with all kinds", "keys that are no words")}


def _differs(family: str, case: Case) -> bool:
    return case.name.startswith((*_LOOK_ALIKE, *_LOSSES.get(family, ())))


@pytest.mark.parametrize("name", _PARSERS)
def test_vllm_reads_the_calls_that_are_no_traps_as_they_were_written(name: str) -> None:
    stage = stage_of(name)
    reader = _VllmParser(stage, _PARSERS[name])
    wrong = {
        case.name: read
        for case in stage.family.cases
        if not case.thought and not _differs(name, case)
        if (read := reader.read(case)) != [(called, dict(args)) for called, args in case.calls]
    }
    assert not wrong


def test_more_than_half_of_the_families_have_this_witness() -> None:
    assert len(_PARSERS) >= 14
    assert {family.name for family in FAMILIES} >= _PARSERS.keys()


class _VllmParser:
    """One of vLLM's parsers, called as its server does."""

    def __init__(self, stage: Stage, parser: str) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        tokenizer: Any = get_cached_tokenizer(stage.tokenizer.fast)
        found: Any = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=True)
        self._make = lambda: found(tokenizer, self._request.tools)
        self._stage = stage
        self._tokenizer: TransformersTokenizer = stage.tokenizer
        self._request = ChatCompletionRequest.model_validate(
            {
                "model": "",
                "messages": [{"role": "user", "content": ""}],
                "tools": [schema(tool) for tool in TOOLS],
                "skip_special_tokens": False,
            }
        )

    def read(self, case: Case) -> list[tuple[str, Any]]:
        ids = self._stage.writer.encode(self._stage.write(case))
        ids = ids[:-1] if ids[-1] in self._stage.dialect.stop_ids else ids
        parser = self._make()
        parser.set_prompt_token_ids(self._stage.prompt_ids.tolist())
        _, _, calls = parser.parse(
            self._tokenizer.decode(ids),
            self._request,
            enable_auto_tools=True,
            model_output_token_ids=ids,
        )
        return [(call.name, json.loads(call.arguments)) for call in calls or []]
