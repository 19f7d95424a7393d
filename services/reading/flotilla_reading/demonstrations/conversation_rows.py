"""Rows of conversation files: messages with tools, in the forms that are common. Pure.

    {"messages": [...], "tools": [...], "key": "task-7", "reward": 1.0}

`messages` are those of OpenAI's API and of chat templates. `conversations` of `from` and `value`
(ShareGPT), and `prompt` with `completion` (TRL) become the same. Unknown keys are errors."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn

import msgspec

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.episodes.conversations import (
    NO_CALL,
    PARSE_ERROR,
    Conversation,
    SaidCall,
    SaidReply,
    SaidTurn,
)

_FORMS = '"messages", "conversations", or "prompt" and "completion"'
_KNOWN = frozenset({"messages", "conversations", "prompt", "completion", "tools", "key", "reward"})
_SHAREGPT = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant"},
    **{"assistant": "assistant", "observation": "tool", "tool": "tool"},
}
_NO_PARAMETERS = {"type": "object", "properties": {}}


class ConversationRowError(ValueError):
    """A row is not in a known form; the message names the field and the reason."""


class LeftOutError(Exception):
    """A conversation that is in order, but not imitated; `fate` is the name under which it is
    counted."""

    def __init__(self, fate: str, message: str) -> None:
        super().__init__(message)
        self.fate = fate


class _Struct(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Function(_Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0


class _Part(_Struct):
    type: str
    text: str = ""
    image_url: Any = None
    image: Any = None


class _Message(_Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] = ""
    reasoning_content: str = ""
    reasoning: str = ""
    thinking: str = ""
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    outcome: str = ""
    by_template: bool = False
    pictures: tuple[str, ...] = ()
    # Of OpenAI's files for fine-tuning: 0 for a turn that is not trained.
    weight: Literal[0, 1] = 1

    @property
    def text(self) -> str:
        """Raises LeftOutError for a message with pictures."""
        parts = [_Part("text", self.content)] if isinstance(self.content, str) else self.content
        if self.pictures or any(part.type != "text" for part in parts):
            raise LeftOutError("with_pictures", "it shows pictures, which are not imitated yet")
        return "".join(part.text for part in parts)


class _ToolFunction(_Struct):
    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: dict(_NO_PARAMETERS))
    strict: bool = False


class _Tool(_Struct):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _Row(_Struct):
    messages: list[_Message]
    tools: list[_Tool] = []
    key: str = ""
    reward: float | None = PASS_REWARD


def read_row(
    row: Any, source: str, place: str, ignored: Collection[str] = ()
) -> Conversation | None:
    """Return the conversation of a row; `ignored` keys are not looked at. None if the row says that
    it has no reward. Raises ConversationRowError, LeftOutError."""
    read = _convert(row, ignored)
    if read.reward is None:
        return None
    messages = [each for each in read.messages if not each.by_template]
    system, prompt, rest = _split_prompt(messages)
    tools = tuple(_to_schema(tool) for tool in read.tools)
    return Conversation(
        *(source, (place, 0, 0), read.key or _name_task(system, prompt), read.reward),
        *(system, prompt, tuple(_make_turns(rest)), tools),
    )


def _convert(row: Any, ignored: Collection[str]) -> _Row:
    if not isinstance(row, Mapping):
        raise ConversationRowError("expected an object")
    fields = {
        name: value for name, value in row.items() if name not in ignored and value is not None
    }
    if unknown := sorted(str(name) for name in fields.keys() - _KNOWN):
        raise ConversationRowError(
            f"unknown keys {', '.join(map(repr, unknown))}: remove them, or name each with --ignore"
        )
    messages = _find_messages(fields)
    tools = fields.get("tools") or []
    if isinstance(tools, str):
        tools = _parse("tools", tools) or []
    # "reward" may be null, which is no missing one.
    given = {"reward": row["reward"]} if "reward" in row and "reward" not in ignored else {}
    if "key" in fields:
        given["key"] = fields["key"]
    wrapped = [_wrap_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    try:
        return msgspec.convert({"messages": messages, "tools": wrapped, **given}, _Row)
    except msgspec.ValidationError as error:
        raise ConversationRowError(str(error)) from error


def _find_messages(fields: Mapping[str, Any]) -> Any:
    """Return the messages of a row in whichever form it has them, without empty fields, which
    tables have for all keys of any row."""
    forms = [name for name in ("messages", "conversations", "prompt") if name in fields]
    if len(forms) != 1 or ("completion" in fields) != (forms == ["prompt"]):
        raise ConversationRowError(
            f"expected {_FORMS}; found {', '.join(map(repr, fields)) or 'nothing'}"
        )
    found: Any
    if forms == ["prompt"]:
        found = [
            *_as_messages("user", fields["prompt"]),
            *_as_messages("assistant", fields["completion"]),
        ]
    else:
        found = fields[forms[0]]
    if isinstance(found, str):
        found = _parse(forms[0], found)
    if not isinstance(found, list):
        raise ConversationRowError(f'"{forms[0]}" must be a list of messages')
    return [_without_empty(_from_sharegpt(each, n)) for n, each in enumerate(found)]


def _as_messages(role: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value]


def _from_sharegpt(message: Any, number: int) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    who, value = message["from"], message.get("value")
    if unknown := sorted(message.keys() - {"from", "value"}):
        raise ConversationRowError(
            f"messages[{number}]: unknown keys {', '.join(map(repr, unknown))}"
        )
    if who == "function_call":
        calls = _parse(f"messages[{number}].value", value)
        made = [{"function": call} for call in (calls if isinstance(calls, list) else [calls])]
        return {"role": "assistant", "tool_calls": made}
    if who not in _SHAREGPT:
        raise ConversationRowError(
            f"messages[{number}].from: {who!r} is none of {', '.join(_SHAREGPT)}"
        )
    return {"role": _SHAREGPT[who], "content": value}


def _without_empty(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {
        name: [_without_empty(each) for each in value] if name == "tool_calls" else value
        for name, value in message.items()
        if value is not None and value != []
    }


def _wrap_tool(tool: Any) -> Any:
    """Return a tool in the form of OpenAI's API, which some files leave out."""
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function", {n: v for n, v in tool.items() if n != "type"})
    if not isinstance(function, Mapping):
        return tool
    named = {name: value for name, value in function.items() if value is not None}
    return {**(tool if "function" in tool else {}), "function": named}


def _to_schema(tool: _Tool) -> dict[str, Any]:
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        },
    }


def _parse(name: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConversationRowError(f"{name}: expected JSON: {error}") from error


def _name_task(system: str, prompt: str) -> str:
    """Name the task of a row without a key: rows with one prompt are of one task."""
    return f"prompt-{hashlib.sha256(json.dumps([system, prompt]).encode()).hexdigest()[:16]}"


def _split_prompt(messages: Sequence[_Message]) -> tuple[str, str, Sequence[_Message]]:
    """Return the system message, what the user says first, and the messages after it."""
    said: dict[str, list[str]] = {"system": [], "user": []}
    begin = 0
    for begin, message in enumerate(messages):  # noqa: B007
        if message.role in ("assistant", "tool"):
            break
        role = "user" if message.role == "user" else "system"
        if role == "system" and said["user"]:
            _leave_out("a system message follows a user's")
        said[role].append(message.text)
    else:
        begin = len(messages)
    if not said["user"]:
        _leave_out("no message of a user comes first")
    system, prompt = ("\n\n".join(each) for each in said.values())
    return system, prompt, messages[begin:]


def _make_turns(messages: Sequence[_Message]) -> list[SaidTurn]:
    """Return turns with what follows each. What follows the last is not read by a turn."""
    starts = [n for n, each in enumerate(messages) if each.role == "assistant"]
    if messages and messages[0].role != "assistant":
        _leave_out("a tool's answer comes before the first turn")
    turns: list[SaidTurn] = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        turn, follows = messages[start], [] if end is None else messages[start + 1 : end]
        if end is not None and not follows:
            _leave_out(f"turns {len(turns) + 1} and {len(turns) + 2} have nothing between them")
        turns.append(_make_turn(turn, follows, len(turns) + 1, last=end is None))
    return turns


def _make_turn(turn: _Message, follows: Sequence[_Message], number: int, *, last: bool) -> SaidTurn:
    replies = [each for each in follows if each.role == "tool" or each.outcome]
    users = [each for each in follows if each not in replies]
    if any(each.role != "user" for each in users) or list(follows) != [*replies, *users]:
        _leave_out(f"turn {number} is followed by other messages than answers, and then a user's")
    calls = tuple(SaidCall(each.function.name, _arguments(each)) for each in turn.tool_calls)
    return SaidTurn(
        content=turn.text,
        thinking=turn.reasoning_content or turn.reasoning or turn.thinking,
        calls=calls,
        replies=() if last else _order_replies(turn.tool_calls, replies, number),
        user="\n\n".join(each.text for each in users),
        trained=bool(turn.weight),
    )


def _arguments(call: _Call) -> str:
    given = call.function.arguments
    value = given if isinstance(given, dict) else _parse("arguments", given or "{}")
    if not isinstance(value, dict):
        raise ConversationRowError(f"the arguments of {call.function.name!r} are no object")
    return json.dumps(value)


def _order_replies(
    calls: Sequence[_Call], replies: Sequence[_Message], number: int
) -> tuple[SaidReply, ...]:
    """Return the answers in the order of their calls, and where they stand those to no call."""
    others = [each for each in replies if each.outcome in (NO_CALL, PARSE_ERROR)]
    answers = [each for each in replies if each not in others]
    if len(answers) != len(calls):
        _leave_out(f"turn {number} has {len(calls)} calls and {len(answers)} answers")
    ids = [call.id for call in calls]
    if all(each.tool_call_id for each in answers) and all(ids):
        if sorted(ids) != sorted(each.tool_call_id for each in answers) or len({*ids}) != len(ids):
            _leave_out(f"the answers after turn {number} are not those to its calls, by their ids")
        answers.sort(key=lambda each: ids.index(each.tool_call_id))
    in_order = iter(answers)
    return tuple(_to_reply(each if each in others else next(in_order)) for each in replies)


def _to_reply(message: _Message) -> SaidReply:
    text = message.text
    if message.outcome:
        # A recorded episode has the error as its policy read it.
        try:
            told = json.loads(text)
        except ValueError:
            told = None
        if isinstance(told, dict) and [*told] == ["error"]:
            text = str(told["error"])
    return SaidReply(text, message.outcome)


def _leave_out(message: str) -> NoReturn:
    raise LeftOutError("not_playable", message)
