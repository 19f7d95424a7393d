"""Roles in a rendered conversation, by the marks of chat templates. Pure, and total."""

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

_BAR, _BLOCK = "\uff5c", "\u2581"
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "SYSTEM_PROMPT": "system",
    "user": "user",
    "User": "user",
    "INST": "user",
    "assistant": "assistant",
    "Assistant": "assistant",
    "model": "assistant",
    "/INST": "assistant",
    "/TOOL_RESULTS": "assistant",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
    "TOOL_RESULTS": "tool",
    f"tool{_BLOCK}output{_BLOCK}begin": "tool",
}
_NAMES = "|".join(map(re.escape, _ROLES))
_MARK = re.compile(
    rf"<\|im_start\|>(?P<chatml>{_NAMES})\b[^\n<]*\n?"
    r"|<\|im_(?P<kimi>user|assistant|system)\|>[^<]*<\|im_middle\|>"
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n*"
    r"|<start_of_turn>(?P<gemma>\w+)\n?"
    r"|<\|turn>(?P<gemma4>\w+)\n?"
    r"|<\|start\|>(?P<harmony>system|developer|user|assistant|functions\.[\w.]+)"
    r"(?P<header>[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"|<\|start\|>(?P<harmony_open>assistant)"
    r"|<\|(?P<plain>system|user|assistant|observation|tool)\|>\n?"
    rf"|<{_BAR}(?P<deepseek>User|Assistant|tool{_BLOCK}output{_BLOCK}begin){_BAR}>"
    r"|\[(?P<mistral>/?INST|SYSTEM_PROMPT|/?TOOL_RESULTS)\]"
)
_END = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<turn\|>|</s>|<eos>|<\|end\|>"
    r"|<\|call\|>|<\|return\|>|<\|endoftext\|>|<\|end_of_text\|>"
    rf"|<{_BAR}end{_BLOCK}of{_BLOCK}sentence{_BAR}>|<{_BAR}tool{_BLOCK}outputs?{_BLOCK}end{_BAR}>"
    r"|\[/SYSTEM_PROMPT\]|\[/AVAILABLE_TOOLS\]|\s)+\Z"
)
# Opening of a conversation, before its first mark.
_BEGIN = re.compile(
    rf"\A(?:<s>|<bos>|\[gMASK\]|<sop>|<\|begin_of_text\|>|<\|startoftext\|>"
    rf"|<{_BAR}begin{_BLOCK}of{_BLOCK}sentence{_BAR}>|\s)+"
)
_REPLY = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
# Tool results in a user's message, as the dialect `full` shows them.
_SHOWN_REPLY = re.compile(r"(?:\A|\n\n)(?=Tool result:\n|Error: )")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A piece of a conversation. `role` is None without a mark before it."""

    role: Role | None
    text: str


def split_marked(text: str, role: Role | None = None) -> list[MarkedText]:
    """Split a text at its marks; `role` is the open one at its start.

    End marks are left out; the last piece may be empty: a template opens the next turn."""
    pieces, begin = list[MarkedText](), 0
    text = text if role else _BEGIN.sub("", text)
    for match in _MARK.finditer(text):
        pieces.append(MarkedText(role, strip_end(text[begin : match.start()])))
        role, begin = _role_of(match), match.end()
    pieces.append(MarkedText(role, strip_end(text[begin:])))
    return [piece for number, piece in enumerate(pieces) if number or piece.text]


def strip_end(text: str) -> str:
    """Strip the end mark of a message, and white space."""
    return _END.sub("", text).lstrip("\n")


def open_role(text: str) -> Role | None:
    """Return the role that a sampled turn opened with its last token, as GLM's models do."""
    mark = _last_mark(text)
    return _role_of(mark) if mark is not None else None


def strip_turn(text: str) -> str:
    """Strip the end of a sampled turn: an end mark, or the mark of the next role."""
    if "<|message|>" in text:
        return text
    mark = _last_mark(text)
    return _END.sub("", text if mark is None else text[: mark.start()])


def split_replies(text: str, calls: int) -> list[str] | None:
    """Return the tool results in a user's message; None if it has none.

    `calls` is the number of calls before it."""
    tagged = _REPLY.findall(text)
    if tagged:
        return tagged
    if not calls or not _SHOWN_REPLY.match(text):
        return None
    shown = [each for each in _SHOWN_REPLY.split(text) if each]
    return shown if len(shown) == calls else [text]


def _last_mark(text: str) -> re.Match[str] | None:
    """Return the mark at the end of a text."""
    found = [mark for mark in _MARK.finditer(text) if mark.end() == len(text)]
    return found[0] if found else None


def _role_of(match: re.Match[str]) -> Role:
    kinds = ("chatml", "kimi", "llama", "gemma", "gemma4", "harmony", "harmony_open")
    name = next(match[kind] for kind in (*kinds, "plain", "deepseek", "mistral") if match[kind])
    return "tool" if name.startswith("functions.") else _ROLES.get(name, "user")
