"""Families of models that test the dialects: docs/models.md is generated from this table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from flotilla_rollout.dialects.call_readers import READERS
from tests.rollout.dialects.native_calls import (
    CASES,
    THINKING_CASES,
    THOUGHT_OF_CALLS,
    XML_CASES,
    Case,
)
from tests.support.model_zoo import SMALL, TEKKEN, make_tokenizer, read_template

REAL = "its own"
_BORROWED = "{}'s vocabulary and its own control tokens"
SMALL_ONE = "a small vocabulary and its own control tokens"


@dataclass(frozen=True)
class Family:
    """One family: where its material comes from, the dialect it is played by, and its oddities.

    `think` is how it writes a thinking, `close` what ends one that the prompt has opened."""

    name: str
    models: Sequence[str]
    template: str
    vocabulary: str
    tokenizer: str
    ends: Sequence[str]
    dialect: str
    control_tokens: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parser: str = ""
    think: str | None = None
    close: str = "\n</think>\n\n"
    # The template wants arguments as text.
    arguments_as_text: bool = False
    # The template renders no more than one call a turn.
    single_call: bool = False
    # Its calls begin with no token of their own: text that spells one is one.
    calls_are_text: bool = False
    # The template drops the thinking of a turn that makes calls, at once or before the next turn.
    drops_thinking: bool = False
    # The reason that the dialect follows a turn with other text than this template.
    follows: str = ""
    # The template shows no tools: the family is refused, unless with a template that does.
    hides_tools: bool = False
    # The renderer writes another prompt than this template.
    own_prompt: bool = False
    # Its pictures are shown, and rehearsed in `test_pictures.py`.
    sees: bool = False
    # A case, and why its call is a parse error that the policy reads.
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def read_by_vllm(self) -> bool:
        return bool(self.parser) and self.parser not in READERS

    @property
    def cases(self) -> Sequence[Case]:
        cases = [*CASES, *XML_CASES, *((*THINKING_CASES, THOUGHT_OF_CALLS) if self.think else ())]
        return [case for case in cases if len(case.calls) == 1 or not self.single_call]

    @property
    def begin(self) -> str:
        """The token at the start of a conversation, where the renderer writes one."""
        return "" if self.dialect == "template" else _BEGINS.get(self.vocabulary, "")

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        return make_tokenizer(
            self.vocabulary, self.control_tokens, read_template(self.template), self.renamed
        )


_BEGINS = {
    "llama3_1": "<|begin_of_text|>",
    "deepseek_v3": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "gemma3": "<bos>",
}
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
_LLAMA_31 = {
    "<|reserved_special_token_2|>": "<|finetune_right_pad_id|>",
    "<|reserved_special_token_4|>": "<|eom_id|>",
    "<|reserved_special_token_5|>": "<|python_tag|>",
}
_TEKKEN_LATER = {"<SPECIAL_32>": "[ARGS]", "<SPECIAL_33>": "[CALL_ID]"}
_GLM = (
    "[gMASK]",
    "<sop>",
    *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation", "endoftext")),
    *_THINK,
    *_TOOL_CALL,
    *_TOOL_RESPONSE,
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_KIMI = (
    *("[BOS]", "[EOS]"),
    *(f"<|im_{part}|>" for part in ("user", "assistant", "system", "middle", "end")),
    *(f"<|tool_calls_section_{part}|>" for part in ("begin", "end")),
    *(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end")),
    *(f"<|media_{part}|>" for part in ("start", "begin", "content", "pad", "end")),
)
_GEMMA_4 = (
    *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
    *(f"<|{kind}{end}" for kind in ("image", "audio", "video") for end in (">", "|>")),
    *(f"<{kind}|>" for kind in ("image", "audio", "video")),
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[", *_THINK, "<minimax:tool_call>", "</minimax:tool_call>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", *_TOOL_CALL)
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_APERTUS = (
    *(
        f"<|{role}_{end}|>"
        for role in ("system", "developer", "user", "assistant")
        for end in ("start", "end")
    ),
    *("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
)
# What a refusal of a template without tools says.
HIDDEN = "the prompt leaves out the names of tools"
_SEED = ("bos", "eos", "pad", "think", "tool_call")
_COMMAND = (
    *(
        f"<|{end}_{part}|>"
        for part in ("ACTION", "RESPONSE", "THINKING", "TOOL_RESULT")
        for end in ("START", "END")
    ),
    *(
        f"<|{part}_TOKEN|>"
        for part in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")
    ),
)
_SPELLS_END = "it contains the end mark of an argument, which is indistinguishable"
_XML_REFUSED = {f"ends of XML in an argument, {n}": _SPELLS_END for n in (1, 2, 3)}
_IM_END = ("<|im_end|>",)
_QWEN_35 = (*_CHATML, *_THINK, *_TOOL_CALL, *_TOOL_RESPONSE)

FAMILIES = (
    Family(
        "Llama 3.1, 3.3",
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        "llama-cpp/meta-llama-Llama-3.1-8B-Instruct.jinja",
        "llama3_1",
        REAL,
        ("<|eot_id|>", "<|eom_id|>"),
        "llama-3",
        renamed=_LLAMA_31,
        single_call=True,
        calls_are_text=True,
        drops_thinking=True,
    ),
    Family(
        "Llama 3.2",
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
        "llama-cpp/meta-llama-Llama-3.2-3B-Instruct.jinja",
        "llama3_1",
        REAL,
        ("<|eot_id|>", "<|eom_id|>"),
        "llama-3",
        own_prompt=True,
        renamed=_LLAMA_31,
        single_call=True,
        calls_are_text=True,
        drops_thinking=True,
    ),
    Family(
        "Qwen2.5",
        ("Qwen/Qwen2.5-7B-Instruct",),
        "llama-cpp/Qwen-Qwen2.5-7B-Instruct.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "template",
    ),
    Family(
        "Qwen3",
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
        "trl/qwen3.jinja",
        "qwen3",
        REAL,
        _IM_END,
        "qwen3",
        think="<think>\n{}\n</think>\n\n",
    ),
    Family(
        "Qwen3-2507",
        ("Qwen/Qwen3-4B-Instruct-2507",),
        "trl/qwen3_instruct_2507.jinja",
        "qwen3",
        REAL,
        _IM_END,
        "qwen3",
    ),
    Family(
        "Qwen3-VL",
        ("Qwen/Qwen3-VL-8B-Instruct",),
        "trl/qwen3_vl.jinja",
        "qwen3",
        REAL,
        _IM_END,
        "qwen3-vl",
        drops_thinking=True,
        sees=True,
    ),
    Family(
        "Qwen3-Coder",
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct",),
        "llama-cpp/Qwen3-Coder.jinja",
        "qwen3",
        REAL,
        _IM_END,
        "template",
        parser="qwen3_coder",
        refused=_XML_REFUSED,
    ),
    Family(
        "Qwen3.5",
        ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-35B-A3B"),
        "trl/qwen3_5_think.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "qwen3.5",
        options={"enable_thinking": True},
        think="<think>\n{}\n</think>\n\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "Qwen3.6",
        ("Qwen/Qwen3.6-35B-A3B",),
        "trl/qwen3_6.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "qwen3.6",
        options={"enable_thinking": True},
        think="<think>\n{}\n</think>\n\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "Qwen3.8",
        ("Qwen/Qwen3.8-27B",),
        "trl/qwen3_8.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "qwen3.8",
        options={"enable_thinking": True},
        think="<think>\n{}\n</think>\n\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "DeepSeek V3",
        ("deepseek-ai/DeepSeek-V3",),
        "trl/deepseekv3.jinja",
        "deepseek_v3",
        REAL,
        (_DEEPSEEK_END,),
        "deepseek-v3",
        own_prompt=True,
        arguments_as_text=True,
        drops_thinking=True,
        hides_tools=True,
    ),
    Family(
        "DeepSeek R1",
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
        "trl/deepseekv3.jinja",
        "deepseek_v3",
        REAL,
        (_DEEPSEEK_END,),
        "deepseek-r1",
        own_prompt=True,
        arguments_as_text=True,
        follows="the dialect opens the thinking of the next turn",
        think="<think>\n{}\n</think>\n\n",
        drops_thinking=True,
        hides_tools=True,
    ),
    Family(
        "DeepSeek V3.1",
        ("deepseek-ai/DeepSeek-V3.1",),
        "llama-cpp/deepseek-ai-DeepSeek-V3.1.jinja",
        "deepseek_v3",
        REAL,
        (_DEEPSEEK_END,),
        "template",
        parser="deepseek_v31",
        hides_tools=True,
    ),
    Family(
        "GLM-4.5, GLM-4.6",
        ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        "llama-cpp/GLM-4.6.jinja",
        SMALL,
        SMALL_ONE,
        ("<|observation|>", "<|user|>"),
        "glm-4.5",
        _GLM,
        think="\n<think>{}</think>\n",
    ),
    Family(
        "GLM-4.7, GLM-5",
        ("zai-org/GLM-4.7-Flash", "zai-org/GLM-5"),
        "llama-cpp/GLM-4.7-Flash.jinja",
        SMALL,
        SMALL_ONE,
        ("<|observation|>", "<|user|>"),
        "glm-5",
        _GLM,
        think="<think>{}</think>",
        close="</think>",
    ),
    Family(
        "Kimi K2",
        ("moonshotai/Kimi-K2-Instruct",),
        "llama-cpp/moonshotai-Kimi-K2.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "kimi-k2",
        (*_KIMI, *_THINK),
        own_prompt=True,
        follows="this copy of the template escapes a line's end and leaves out the tool's name",
        drops_thinking=True,
    ),
    Family(
        "gpt-oss",
        ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        "llama-cpp/openai-gpt-oss-120b.jinja",
        "gptoss",
        REAL,
        ("<|call|>", "<|return|>"),
        "gpt-oss",
        own_prompt=True,
        think="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        close="<|end|><|start|>assistant",
        single_call=True,
        follows="the template quotes answers as JSON, and the dialect opens a thinking",
    ),
    Family(
        "MiniMax M2",
        ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
        "llama-cpp/MiniMax-M2.jinja",
        SMALL,
        SMALL_ONE,
        ("[e~[",),
        "minimax-m2",
        _MINIMAX,
        own_prompt=True,
        think="<think>\n{}\n</think>\n\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "Gemma 4",
        ("google/gemma-4-E4B-it", "google/gemma-4-31B-it"),
        "trl/gemma4_v5.jinja",
        "gemma3",
        _BORROWED.format("Gemma 3"),
        ("<turn|>", "<|tool_response>"),
        "gemma4",
        _GEMMA_4,
        think="<|channel>thought\n{}<channel|>",
        refused={"keys that are no words": "the template writes keys without quotes"},
    ),
    Family(
        "Nemotron 3",
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
        "trl/nemotron_3_nano.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "nemotron-3",
        _QWEN_35,
        think="<think>\n{}\n</think>\n",
        close="\n</think>\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "Granite 4.0, 4.1",
        ("ibm-granite/granite-4.0-h-small",),
        "llama-cpp/ibm-granite-granite-4.0.jinja",
        SMALL,
        SMALL_ONE,
        ("<|end_of_text|>",),
        "template",
        _GRANITE,
    ),
    Family(
        "Hermes 3",
        ("NousResearch/Hermes-3-Llama-3.1-8B",),
        "llama-cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "template",
        (*_CHATML, *_TOOL_CALL),
        drops_thinking=True,
    ),
    Family(
        "MiMo",
        ("XiaomiMiMo/MiMo-VL-7B-RL",),
        "llama-cpp/MiMo-VL.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "template",
    ),
    Family(
        "Bielik 3",
        ("speakleash/Bielik-11B-v3.0-Instruct",),
        "llama-cpp/Bielik-11B-v3.0-Instruct.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "template",
        (*_CHATML, *_THINK, *_TOOL_CALL, "<|function_list|>", "<|function_output|>"),
    ),
    Family(
        "Mistral Nemo",
        ("mistralai/Mistral-Nemo-Instruct-2407",),
        "llama-cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja",
        TEKKEN,
        REAL,
        ("</s>",),
        "template",
        parser="mistral",
        drops_thinking=True,
    ),
    Family(
        "Mistral Small 3.2",
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506",),
        "llama-cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja",
        TEKKEN,
        REAL,
        ("</s>",),
        "template",
        renamed=_TEKKEN_LATER,
        parser="mistral",
        drops_thinking=True,
    ),
    Family(
        "Devstral, Mistral Small 3.1",
        ("mistralai/Devstral-Small-2507",),
        "llama-cpp/unsloth-mistral-Devstral-Small-2507.jinja",
        TEKKEN,
        REAL,
        ("</s>",),
        "template",
        renamed=_TEKKEN_LATER,
        parser="mistral",
    ),
    Family(
        "Ministral 3",
        ("mistralai/Ministral-3-14B-Reasoning-2512",),
        "llama-cpp/mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        TEKKEN,
        REAL,
        ("</s>",),
        "template",
        renamed=_TEKKEN_LATER,
        parser="mistral",
    ),
    Family(
        "QwQ",
        ("Qwen/QwQ-32B",),
        "llama-cpp/Qwen-QwQ-32B.jinja",
        "qwen3",
        _BORROWED.format("Qwen3"),
        _IM_END,
        "template",
        drops_thinking=True,
    ),
    Family(
        "Hermes 2 Pro",
        ("NousResearch/Hermes-2-Pro-Llama-3-8B",),
        "llama-cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "template",
        (*_CHATML, *_TOOL_CALL),
        drops_thinking=True,
    ),
    Family(
        "Nemotron 3 Super",
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",),
        "trl/nemotron_3_super.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "nemotron-3",
        _QWEN_35,
        think="<think>\n{}\n</think>\n",
        close="\n</think>\n",
        refused=_XML_REFUSED,
    ),
    Family(
        "DeepSeek V4",
        ("deepseek-ai/DeepSeek-V4",),
        "llama-cpp/deepseek-ai-DeepSeek-V4.jinja",
        "deepseek_v3",
        _BORROWED.format("DeepSeek V3"),
        (_DEEPSEEK_END,),
        "template",
        ("\uff5cDSML\uff5c",),
        parser="deepseek_v4",
    ),
    Family(
        "Apertus",
        ("swiss-ai/Apertus-8B-Instruct-2509",),
        "llama-cpp/Apertus-8B-Instruct.jinja",
        SMALL,
        SMALL_ONE,
        ("<|tools_suffix|>",),
        "template",
        _APERTUS,
        parser="apertus",
    ),
    Family(
        "Step 3.5",
        ("stepfun-ai/Step-3.5-Flash",),
        "llama-cpp/StepFun3.5-Flash.jinja",
        SMALL,
        SMALL_ONE,
        _IM_END,
        "template",
        _QWEN_35,
        parser="qwen3_coder",
        think="<think>\n{}\n</think>\n",
        close="\n</think>\n",
        refused=_XML_REFUSED,
    ),
)


@dataclass(frozen=True)
class Refusal:
    """A model that no dialect with native calls plays, with its error message."""

    models: str
    template: str
    message: str
    why: str
    parser: str = ""
    control_tokens: Sequence[str] = ()
    ends: str = "</s>"
    # True where `rollout.dialect.name = "full"` plays it.
    plays_full: bool = True


_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
REFUSALS = (
    Refusal(
        "Gemma 3",
        "trl/gemma3.jinja",
        "Conversation roles must alternate",
        "the template supports neither tools nor their results",
        control_tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    Refusal(
        "Llama 3 (8B, 70B)",
        "trl/llama3.jinja",
        "a call that the chat template writes is not read again",
        "the template leaves out calls",
        control_tokens=_HEADERS,
    ),
    Refusal(
        "Phi-3.5",
        "trl/phi3_5.jinja",
        "the chat template leaves out a tool message where 1 follow a turn",
        "the template supports neither tools nor their results",
        control_tokens=("<|user|>", "<|assistant|>", "<|end|>", "<|system|>"),
    ),
    Refusal(
        "Granite 3.3",
        "llama-cpp/ibm-granite-granite-3.3-2B-Instruct.jinja",
        "a call that the chat template writes is not read again",
        "the template leaves out calls",
        parser="granite",
        control_tokens=_GRANITE,
    ),
    Refusal(
        "SmolLM3",
        "llama-cpp/HuggingFaceTB-SmolLM3-3B.jinja",
        "a call that the chat template writes is not read again",
        "the template leaves out calls",
        control_tokens=(*_CHATML, *_THINK),
    ),
    Refusal(
        "Functionary 3.1",
        "llama-cpp/meetkai-functionary-medium-v3.1.jinja",
        "a call that the chat template writes is not read again",
        "no parser reads its calls",
        control_tokens=_HEADERS,
    ),
    Refusal(
        "Functionary 3.2",
        "llama-cpp/meetkai-functionary-medium-v3.2.jinja",
        "a call that the chat template writes is not read again",
        "no parser reads its calls",
        control_tokens=_HEADERS,
    ),
    Refusal(
        "Nemotron Nano v2",
        "llama-cpp/NVIDIA-Nemotron-Nano-v2.jinja",
        "a call that the chat template writes is not read again",
        "no parser reads its calls",
        control_tokens=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", *_THINK),
    ),
    Refusal(
        "Seed-OSS",
        "llama-cpp/ByteDance-Seed-OSS.jinja",
        'argument "tags" of a tool call is not valid JSON',
        "the template writes lists and objects as Python does",
        parser="seed_oss",
        control_tokens=tuple(f"<{end}seed:{each}>" for end in ("", "/") for each in _SEED),
        ends="<seed:eos>",
    ),
    Refusal(
        "Kimi K2 Thinking",
        "llama-cpp/Kimi-K2-Thinking.jinja",
        "access to attribute 'append' of 'list' object is unsafe",
        "the template changes lists, which the sandbox of transformers forbids",
        parser="kimi_k2",
        control_tokens=(*_KIMI, *_THINK),
    ),
    Refusal(
        "Firefunction 2",
        "llama-cpp/fireworks-ai-llama-3-firefunction-v2.jinja",
        "'functions' is undefined",
        "the template expects functions and does not support tools",
        control_tokens=_HEADERS,
        plays_full=False,
    ),
    Refusal(
        "Command R7B",
        "llama-cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
        "the chat template rewrites, repeats or leaves out earlier turns",
        "the template rewrites the policy's turns",
        parser="cohere_command3",
        control_tokens=_COMMAND,
        plays_full=False,
    ),
)
