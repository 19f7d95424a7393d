"""A policy's turn as text: its thinking, its calls and the rest. Pure, and total: it reads every
text.

The parser knows neither the model's family nor its tools: a block in no known form stays in the
content unchanged. The rollout's dialects decided what was executed; this is for people and for
exports."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_CALLS = 1_000
_BAR, _BLOCK = "\uff5c", "\u2581"
_THINKING = re.compile(r"<(?P<tag>think|seed:think)>|\[(?P<mark>THINK)\]")
_THINKING_ENDS = re.compile(r"</(?:think|seed:think)>|\[/THINK\]")
# Opening mark of a call, and its closing mark, which may be missing.
_OPENINGS: Mapping[str, str] = {
    "<tool_call>": "</tool_call>",
    "<function_call>": "</function_call>",
    "<seed:tool_call>": "</seed:tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<|python_tag|>": "<|eom_id|>",
    "[TOOL_CALLS]": "",
    f"<{_BAR}tool{_BLOCK}call{_BLOCK}begin{_BAR}>": f"<{_BAR}tool{_BLOCK}call{_BLOCK}end{_BAR}>",
    "<|tool_call_begin|>": "<|tool_call_end|>",
}
_OPENING = re.compile("|".join(map(re.escape, _OPENINGS)))
# Marks around all calls of a turn, redundant beside those of each call.
_FRAMES = re.compile(
    rf"<{_BAR}tool{_BLOCK}calls{_BLOCK}(?:begin|end){_BAR}>|<\|tool_calls_section_(?:begin|end)\|>"
)
_WRITTEN = re.compile(
    r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>"
    r'|<invoke name="(?P<invoked>[^"\n]+)">(?P<invoked_body>.*?)</invoke>',
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r'|<parameter name="(?P<named>[^"\n]+)">(?P<named_value>.*?)</parameter>',
    re.DOTALL,
)
_KEYED = re.compile(r"\s*(?P<name>[^<\s]+)\s*(?P<body>(?:<arg_key>.*)?)", re.DOTALL)
_KEYED_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL
)
# A name, an id if the family writes one, and JSON.
_MARKED = re.compile(
    rf"\s*(?:function<{_BAR}tool{_BLOCK}sep{_BAR}>)?(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
    rf"(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|<{_BAR}tool{_BLOCK}sep{_BAR}>|<\|tool_call_argument_begin\|>"
    r"|```json\s)\s*"
)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<early>[\w.]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?:\s*to=(?P<to>[\w.]+))?[^<]*(?:<\|constrain\|>\w+)?<\|message\|>(?P<text>.*?)"
    r"(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """A call that a policy wrote. `arguments` is None if they are not a JSON object; their text is
    kept in any case."""

    name: str
    arguments: dict[str, Any] | None
    arguments_text: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class AssistantText:
    """The parts of a turn."""

    content: str
    thinking: str = ""
    calls: tuple[EpisodeCall, ...] = ()


def read_assistant(text: str, *, thinking_open: bool = False) -> AssistantText:
    """Read a turn without its end mark; `thinking_open` means that it starts inside thinking."""
    if "<|channel|>" in text or "<|message|>" in text:
        return _read_harmony(text)
    thinking, rest = _split_thinking(text, thinking_open)
    content, calls = _read_calls(rest)
    return AssistantText(content.strip(), thinking.strip(), tuple(calls))


def _split_thinking(text: str, is_open: bool) -> tuple[str, str]:
    """Return the thinking, and the text before and after it."""
    start = _THINKING.search(text)
    end = _THINKING_ENDS.search(text)
    if end is not None and (is_open or start is None or start.start() > end.start()):
        return text[: end.start()], text[end.end() :]
    if is_open:
        return text, ""
    if start is None:
        return "", text
    if end is None:
        return text[start.end() :], text[: start.start()]
    return text[start.end() : end.start()], text[: start.start()] + text[end.end() :]


def _read_calls(text: str) -> tuple[str, list[EpisodeCall]]:
    """Return the text outside of calls, and the calls."""
    outside, calls, position = list[str](), list[EpisodeCall](), 0
    while len(calls) < _MOST_CALLS and (match := _OPENING.search(text, position)):
        outside.append(text[position : match.start()])
        found, position = _read_block(text, match)
        if found:
            calls += found
        else:
            outside.append(text[match.start() : position])
    outside.append(text[position:])
    if not calls and (alone := _read_json_call(text.strip())):
        return "", [alone]
    return _FRAMES.sub("", "".join(outside)), calls


def _read_block(text: str, match: re.Match[str]) -> tuple[list[EpisodeCall], int]:
    """Read the calls after an opening mark; return them, and the end of the block.

    JSON is read first, and the end sought behind it: an end mark within a string ends nothing."""
    close = _OPENINGS[match.group()]
    value, end = _decode_json(text, match.end())
    if end is not None:
        if close and text.startswith(close, _skip_space(text, end)):
            end = _skip_space(text, end) + len(close)
        each = value if isinstance(value, list) else [value]
        calls = [call for item in each if (call := _make_call(item))]
        return (calls if len(calls) == len(each) else []), end
    if named := _MARKED.match(text, match.end()):
        arguments, end = _decode_json(text, named.end())
        if end is not None:
            close_at = text.find(close, end) if close else end
            stop = end if close_at < 0 else close_at + len(close)
            return [_call_of(named["name"], arguments, text[named.end() : end])], stop
    close_at = text.find(close, match.end()) if close else -1
    if close_at < 0:
        return [], match.end()
    block = text[match.end() : close_at]
    return list(_read_written(block)), close_at + len(close)


def _read_written(block: str) -> Iterator[EpisodeCall]:
    """Read calls whose arguments are written verbatim between tags."""
    found = False
    for match in _WRITTEN.finditer(block):
        found = True
        body = match["body"] if match["body"] is not None else match["invoked_body"]
        arguments = {
            (each["key"] or each["named"]).strip(): _value_of(
                each["value"] if each["value"] is not None else each["named_value"]
            )
            for each in _PARAMETER.finditer(body)
        }
        yield _call_of((match["name"] or match["invoked"]).strip(), arguments, body)
    keyed = None if found else _KEYED.fullmatch(block)
    if keyed is not None:
        arguments = {
            each["key"].strip(): _value_of(each["value"])
            for each in _KEYED_ARGUMENT.finditer(keyed["body"])
        }
        yield _call_of(keyed["name"], arguments, keyed["body"])


def _value_of(text: str) -> Any:
    """Return a written argument: decoded if it is JSON, except for numbers with more digits than
    JSON readers keep."""
    value, end = _decode_json(text, 0)
    return value if end is not None and not text[end:].strip() else text


def _read_harmony(text: str) -> AssistantText:
    """Read channels: `analysis` is thinking, text addressed to a function is a call."""
    content, thinking, calls = list[str](), list[str](), list[EpisodeCall]()
    for match in _HARMONY.finditer(text):
        receiver = match["early"] or match["to"] or ""
        if receiver.startswith("functions."):
            arguments, _ = _decode_json(match["text"], 0)
            calls.append(_call_of(receiver.partition(".")[2], arguments, match["text"]))
        else:
            (thinking if match["channel"] == "analysis" else content).append(match["text"])
    if not (content or thinking or calls):
        return AssistantText(text.strip())
    return AssistantText("\n".join(content).strip(), "\n".join(thinking).strip(), tuple(calls))


def _read_json_call(text: str) -> EpisodeCall | None:
    """Read a text that is nothing but a call, as Llama's models write it."""
    if not text.startswith("{"):
        return None
    value, end = _decode_json(text, 0)
    return _make_call(value) if end == len(text) else None


def _make_call(value: Any) -> EpisodeCall | None:
    """Make the call of a JSON object, under any of the keys that families use."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    given: dict[str, Any] = inner if isinstance(inner, dict) else value
    name = given.get("name")
    name = inner if name is None and isinstance(inner, str) else name
    keys = [key for key in ("arguments", "parameters") if key in given]
    if not isinstance(name, str) or not name or not (keys or len(given) == 1):
        return None
    arguments = given[keys[0]] if keys else {}
    text = arguments if isinstance(arguments, str) else _to_text(arguments)
    call_id = value.get("id")
    return _call_of(name, arguments, text, call_id if isinstance(call_id, str) else "")


def _call_of(name: str, arguments: Any, text: str, call_id: str = "") -> EpisodeCall:
    if isinstance(arguments, str):
        arguments, _ = _decode_json(arguments, 0)
    known = isinstance(arguments, dict) and _is_printable(arguments)
    return EpisodeCall(_mend(name), arguments if known else None, _mend(text.strip()), call_id)


def _is_printable(value: Any) -> bool:
    """Return False for a value with half a surrogate pair, which UTF-8 cannot encode."""
    try:
        _to_text(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _mend(text: str) -> str:
    return text.encode(errors="replace").decode()


def _to_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _decode_json(text: str, start: int) -> tuple[Any, int | None]:
    """Return the value that starts at `start`, and its end; (None, None) if there is none."""
    try:
        return _DECODER.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError):
        return None, None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
