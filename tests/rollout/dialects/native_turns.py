"""Turns as a family's own chat template spells them, in the token ids that a model would sample.

Data that looks like a control token is written with ordinary tokens, as a model writes it that
speaks of one; the template's own control tokens are control tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from flotilla_rollout.types import Tool
from tests.rollout.dialects.families import Family
from tests.rollout.dialects.native_calls import Case

# Breaks up what looks like a control token; no text of a case has it.
_BREAK = "\ue000"
TASK = "Please do it."
_QUESTION = {"role": "user", "content": TASK}
_NO_THINKING = re.compile(r"\A\s*(?:<think>\s*)?</think>\s*")


class NativeWriter:
    """One family's template, as published, applied by transformers."""

    def __init__(self, family: Family, tokenizer: PreTrainedTokenizerFast) -> None:
        self._family = family
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        # Some vocabularies add words and spaces to them.
        marks = [str(each) for each in added if each.special or str(each).startswith(("<", "["))]
        self._control = sorted(marks, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, self._control)))

    def write(self, case: Case, tools: Sequence[Tool], prompt: str) -> str:
        """Return a turn up to its end, as it follows `prompt`, marked for `encode`.

        Raises what the template raises."""
        own = self.render([_QUESTION], tools, generate=True)
        whole = self.render([_QUESTION, self._message(case)], tools, generate=False)
        start = self._common_start(own, whole)
        header, turn = start[-12:], self._cut(whole[len(start) :])
        opened = prompt[prompt.rindex(header) + len(header) :]
        if turn.startswith(opened) and self._shield(case.thought) in turn:
            return turn[len(opened) :]
        turn = _NO_THINKING.sub("", turn)
        thought = self._shield(case.thought)
        if opened:
            return thought + self._family.close + turn
        return (self._family.think or "").format(thought) + turn

    def write_replies(
        self, case: Case, tools: Sequence[Tool], ids: Sequence[str], replies: Sequence[str]
    ) -> str:
        """Render a conversation up to the turn that follows replies to the calls of a case."""
        message = self._message(case)
        for call, call_id in zip(message["tool_calls"], ids, strict=True):
            call["id"] = call_id or call["id"]
        answers = [
            {
                "role": "tool",
                "content": reply,
                "name": call["function"]["name"],
                "tool_call_id": call["id"],
            }
            for call, reply in zip(message["tool_calls"], replies, strict=True)
        ]
        return self.render([_QUESTION, message, *answers], tools, generate=True)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, generate: bool
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[schema(tool) for tool in tools],
                add_generation_prompt=generate,
                tokenize=False,
                bos_token="",
                eos_token=self._family.ends[0],
                **self._family.options,
            )
        )

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """Return the ids of a marked text; `plain` when no control token is one."""
        text = text.replace("\\ue000", _BREAK)
        if plain:
            text = self._shield(text)
        return [
            token
            for piece in text.split(_BREAK)
            for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def _common_start(self, prompt: str, whole: str) -> str:
        """Return what both begin with, up to where no control token is cut in two."""
        length = next(
            (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b),
            min(len(prompt), len(whole)),
        )
        for token in (*self._control, "<think>", "</think>"):
            first, end = length - min(len(token), length) + 1, length + len(token) - 1
            start = max(text.rfind(token, first, end) for text in (whole, prompt))
            if start >= 0:
                return whole[:start]
        return whole[:length]

    def _message(self, case: Case) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._shield(case.text)}
        if case.thought:
            message["reasoning_content"] = self._shield(case.thought)
        calls = [self._call(number, *call) for number, call in enumerate(case.calls)]
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        shown = self._shield(arguments)
        if self._family.arguments_as_text:
            shown = json.dumps(shown, ensure_ascii=False)
        function = {"name": name, "arguments": shown}
        return {"id": f"call{number:05d}", "type": "function", "function": function}

    def _cut(self, text: str) -> str:
        """Cut a turn behind the token that ends it; add that where the next turn would begin it."""
        found = [at + len(end) for end in self._family.ends if (at := text.find(end)) >= 0]
        return text[: max(found)] if found else text.rstrip("\n") + self._family.ends[0]

    def _shield(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark.sub(lambda match: match[0][:1] + _BREAK + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._shield(each) for each in value]
        return value


def schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}
