"""Reading of calls by vLLM's tool parsers, and the marks of its reasoning parsers, by name."""

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.argument_kinds import find_argument_kinds
from flotilla_rollout.dialects.call_proof import CallProof
from flotilla_rollout.dialects.call_readers import SampledTurn
from flotilla_rollout.dialects.call_values import (
    Required,
    check_call_keys,
    make_call,
    required_arguments,
)
from flotilla_rollout.dialects.marked_text import BREAK, TagMarker, mend_text, mend_value
from flotilla_rollout.dialects.thinking import ThinkingForm
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.types import Tool

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser

# Private-use characters. One that a turn lacks stands for the break in a tag that the policy
# spelled in ordinary tokens: parsers refuse half a surrogate.
_SHIELDS = tuple(map(chr, range(0xE000, 0xF900)))
# The parser that reads token ids instead of text.
_HARMONY = "openai"
_TAG = re.compile(r"</[^<>\s]+>\Z")
# Number of cached requests, one per set of tools.
_MOST_REQUESTS = 256


class VllmCallReader:
    """Reader by one tool parser. It gets only the text after the thinking: it would take a
    considered call for a real one.

    Raises ConfigError if vLLM has no parser of that name, or it does not accept the tokenizer."""

    def __init__(self, tokenizer: TransformersTokenizer, proof: CallProof, parser: str) -> None:
        self._tokenizer = tokenizer
        # With a cached vocabulary, because parsers read it at each turn.
        self._cached = get_cached_tokenizer(tokenizer.fast)
        self._reads_ids = parser == _HARMONY
        self._parser = _find_parser(tokenizer, parser)
        self._proof = proof
        # Parsers log a stack for each malformed call; policy and metrics get the error anyway.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._closing = _find_closing(tokenizer, proof.end)
        # After the quote of an argument.
        self._end = proof.end.lstrip("\"'")
        self._marker = TagMarker(tokenizer, tokenizer.added_tokens)
        self._request = lru_cache(_MOST_REQUESTS)(_make_request)

    def read_turn(self, turn: SampledTurn, tools: Sequence[Tool]) -> Turn:
        ids = list(turn.answer_ids)
        marked = self._marker.mark(ids)
        shield = _choose_shield(marked)
        text = marked.replace(BREAK, shield)
        request = self._request(_ToolBox(tools))
        parser: Any = self._parser(self._cached, request.tools)  # pyright: ignore[reportArgumentType]
        parser.set_prompt_token_ids(turn.prompt_ids.tolist())
        given = () if shield and not self._reads_ids else ids
        _, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=given
        )
        required = required_arguments(tools)
        items = [self._make_item(each, text, shield, required, tools) for each in calls or []]
        if items and not self._is_closed(text):
            # Some parsers complete an unfinished call, but half an argument is a different one.
            items[-1] = ParseError("tool call has no end")
        answer = mend_text(content or "", shield).strip()
        return Turn(self._proof.check(marked, answer, items), False, answer)

    def _make_item(
        self, call: Any, text: str, shield: str, required: Required, tools: Sequence[Tool]
    ) -> ToolCall | ParseError:
        name = mend_text(call.name, shield)
        try:
            arguments = mend_value(json.loads(call.arguments or "{}"), shield)
        except ValueError:
            return ParseError("tool call has arguments that are not valid JSON")
        if not self._proof.in_json and isinstance(arguments, dict):
            arguments = _restore_texts(arguments, name, tools)
        if arguments == {} and (wrong := self._check_unread_keys(text, name, required)):
            return wrong
        made = make_call({"name": name, "arguments": arguments}, required)
        # If the policy wrote no id, the parser has invented one.
        if isinstance(made, ToolCall) and call.id and call.id in text:
            return ToolCall(made.name, made.arguments_json, call.id)
        return made

    def _check_unread_keys(self, text: str, name: str, required: Required) -> ParseError | None:
        """Search for the JSON object of a call that was read as one without arguments."""
        decoder = json.JSONDecoder()
        begin = text.find("{")
        while begin >= 0:
            try:
                value, _ = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict) and value.get("name") == name:
                return check_call_keys(json.dumps(value), name, required, self._proof.keys)
            begin = text.find("{", begin + 1)
        return check_call_keys("", name, required)

    def _is_closed(self, text: str) -> bool:
        """Return False if the last call of a text lacks its end mark or its last text."""
        if not self._closing:
            return text.rstrip().endswith(self._end)
        begin = max((text.rfind(mark) for mark in self._proof.openings), default=0)
        return text.find(self._closing, max(begin, 0)) >= 0


class _ToolBox:
    """Tools by identity, as a key: each turn of an attempt has the same ones."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools

    def __hash__(self) -> int:
        return id(self.tools)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ToolBox) and other.tools is self.tools


def _make_request(box: _ToolBox) -> ChatCompletionRequest:
    functions = [
        {"name": each.name, "description": each.description, "parameters": dict(each.parameters)}
        for each in box.tools
    ]
    return ChatCompletionRequest.model_validate(
        {
            "model": "",
            "messages": [{"role": "user", "content": ""}],
            "tools": [{"type": "function", "function": each} for each in functions] or None,
            "tool_choice": "auto" if functions else "none",
            "skip_special_tokens": False,
        }
    )


def find_thinking_form(tokenizer: TransformersTokenizer, name: str) -> ThinkingForm:
    """Return the form of thinking of vLLM's reasoning parser of that name.

    Raises ConfigError if there is none, or it does not use two marks."""
    _check_name("rollout.dialect.reasoning", name, ReasoningParserManager.list_registered())
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer.fast)  # pyright: ignore[reportArgumentType]
        begin, end = parser.reasoning_start_str, parser.reasoning_end_str
    except Exception as error:
        raise ConfigError(f"rollout.dialect.reasoning: {error}") from error
    if begin is None or end is None:
        raise ConfigError(
            f"rollout.dialect.reasoning: vLLM's {name!r} knows no marks around a thinking; name the"
            " model's family in rollout.dialect.name"
        )
    return ThinkingForm(begin, end, f"\n{end}\n\n")


def _find_parser(tokenizer: TransformersTokenizer, name: str) -> "type[Parser]":
    _check_name("rollout.dialect.parser", name, ToolParserManager.list_registered())
    try:
        found = ParserManager.get_parser(
            tool_parser_name=name,
            enable_auto_tools=True,
            is_harmony=name == _HARMONY,
            tokenizer=tokenizer.fast,  # pyright: ignore[reportArgumentType]
        )
    except Exception as error:
        raise ConfigError(f"rollout.dialect.parser: {error}") from error
    assert found is not None
    return found


def _check_name(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}: vLLM has no {name!r}{hint}; known: {', '.join(sorted(known))}")


def _find_closing(tokenizer: TransformersTokenizer, end: str) -> str:
    """Return the end of a call in a sample: its last control token or tag, if it has one."""
    last = end.split()[-1] if end else ""
    token = next((mark for mark in tokenizer.added_tokens if last.endswith(mark)), "")
    tag = _TAG.search(last)
    return token or (tag[0] if tag else "")


def _restore_texts(
    arguments: Mapping[str, Any], name: str, tools: Sequence[Tool]
) -> Mapping[str, Any]:
    """Return arguments with texts where only texts are allowed: some parsers read unquoted ones
    that look like numbers as numbers. The proof refuses those that were spelled in another way."""
    tool = next((tool for tool in tools if tool.name == name), None)
    kinds = {} if tool is None else find_argument_kinds(tool)
    return {
        key: value
        if isinstance(value, str) or kinds.get(key) != {"string"}
        else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }


def _choose_shield(text: str) -> str:
    """Return a character that the text lacks, in any spelling; empty if the text has no break."""
    if BREAK not in text:
        return ""
    written = text.lower()
    return next(each for each in _SHIELDS if each not in text and f"{ord(each):x}" not in written)
