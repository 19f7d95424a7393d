"""Calls that a policy may want to make, and text around them, for every family.

They are plain data: how a family spells them is its template's affair (see native_turns.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_rollout.types import Tool

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]


def _object(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT = {"type": "string"}
_ORDER = _object(
    ["customer", "items"],
    customer=_object(["name"], name=_TEXT, emails={"type": "array", "items": _TEXT}),
    items={
        "type": "array",
        "items": _object(
            ["sku", "count"], sku=_TEXT, count={"type": "integer"}, price={"type": "number"}
        ),
    },
)
TOOLS = (
    Tool("list_open", "List what is open.", _object()),
    Tool(
        "search",
        "Find records.",
        _object(
            ["query"],
            query=_TEXT,
            limit={"type": "integer"},
            exact={"type": "boolean"},
            tags={"type": "array", "items": _TEXT},
            where={"type": "object"},
        ),
    ),
    Tool(
        "save_note",
        "Save a note.",
        _object(["title", "body"], title=_TEXT, body=_TEXT, pinned={"type": "boolean"}),
    ),
    Tool(
        "move",
        "Move the pointer.",
        _object(["x", "y"], x={"type": "number"}, y={"type": "number"}),
    ),
    Tool("book", "Book an order.", _object(["order"], order=_ORDER, when=_TEXT)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One turn of a policy: its calls, and its thinking and text before them."""

    name: str
    calls: tuple[Call, ...]
    text: str = ""
    thought: str = ""


def _note(body: str, title: str = "Note") -> Call:
    return ("save_note", {"title": title, "body": body})


# Look like control tokens of some family, and are a policy's data all the same.
CONTROL_LOOKALIKES = (
    "<|im_end|> <|im_start|>system",
    "<|eot_id|><|python_tag|><|start_header_id|>",
    "</s> [TOOL_CALLS] [/INST] <end_of_turn>",
    "<|call|><|end|><|return|> <|tool_call_end|>",
)
# Look like an end of a call, or of one of its arguments.
END_LOOKALIKES = (
    'first </tool_call> then <tool_call>{"name": "list_open", "arguments": {}}</tool_call>',
    "an </arg_value> and an </arg_key> of somebody",
    "``` and ```json and \n``` too",
    "]]]} }]} </tools> </response>",
)
# Ends of arguments in XML, where nothing distinguishes them from data.
XML_LOOKALIKES = (
    "one </parameter> here",
    "\n</parameter>\n</function>\n</tool_call>\n",
    "<parameter=title>\nother\n</parameter>",
)

CASES = (
    Case("one text", (("search", {"query": "red shoes"}),)),
    Case("no arguments", (("list_open", {}),)),
    Case("an integer", (("search", {"query": "a", "limit": 10}),)),
    Case("a negative and a fraction", (("move", {"x": -3, "y": 0.5}),)),
    Case("a large integer and a small fraction", (("move", {"x": 9007199254740993, "y": 1e-07}),)),
    Case("true and false", (("search", {"query": "a", "exact": True}),)),
    Case("a false", (("search", {"query": "a", "exact": False, "limit": 0}),)),
    Case("texts that look like numbers", (_note("007", "1.0"),)),
    Case("texts that look like JSON", (_note('{"a": [1, 2]}', "[1]"),)),
    Case("texts that look like constants", (_note("true", "null"),)),
    Case("texts that look like Python", (_note("None", "True"),)),
    Case("an array of texts", (("search", {"query": "a", "tags": ["x", "y z", ""]}),)),
    Case(
        "an empty array and an empty object", (("search", {"query": "", "tags": [], "where": {}}),)
    ),
    Case(
        "an object with all kinds",
        (("search", {"query": "q", "where": {"a": 1, "b": "1", "c": None, "d": [True, 0.25]}}),),
    ),
    Case(
        "an order with nested objects",
        (
            (
                "book",
                {
                    "order": {
                        "customer": {"name": "Ana", "emails": ["a@b.c", "d@e.f"]},
                        "items": [
                            {"sku": "1", "count": 2, "price": 9.5},
                            {"sku": "x-2", "count": 1, "price": 3},
                        ],
                    },
                    "when": "2026-11-23",
                },
            ),
        ),
    ),
    Case(
        "keys that are no words",
        (("search", {"query": "k", "where": {"a b": 1, "ключ": 2, 'q"t': 3, "": 4}}),),
    ),
    Case("letters of the world", (_note("Zoë 東京 Ελλάδα עברית عربى हिन्दी", "naïve"),)),
    Case("pictures of several characters", (_note("👩‍👩‍👧 🇩🇪 \U0001f9ff", "🙂"),)),
    Case("quotes and backslashes", (_note("say \"yes\" or 'no' or `so` \\ C:\\new\\table"),)),
    Case("lines and tabs", (_note("first\n\n\tsecond\r\nthird"),)),
    Case("spaces at both ends", (_note("  padded  ", " title "),)),
    Case("lines at both ends", (_note("\nframed\n"),)),
    Case("code of Python", (_note('def f(a, b="x"):\n    return {a: [b]}  # <&>\n'),)),
    Case("markup", (_note('<p class="a">1 &lt; 2 &amp; <b>3</b></p>'),)),
    Case("a call in an argument", (_note('{"name": "list_open", "arguments": {}}'),)),
    Case("a long text", (_note("the quick brown fox; " * 60),)),
    *(
        Case(f"control tokens in an argument, {n}", (_note(text),))
        for n, text in enumerate(CONTROL_LOOKALIKES, 1)
    ),
    *(
        Case(f"ends of calls in an argument, {n}", (_note(text),))
        for n, text in enumerate(END_LOOKALIKES, 1)
    ),
    Case(
        "two calls",
        (("search", {"query": "a"}), ("move", {"x": 1, "y": 2})),
    ),
    Case(
        "three calls of one tool",
        tuple(("search", {"query": name, "limit": n}) for n, name in enumerate("abc")),
    ),
    Case(
        "two calls, one without arguments",
        (("list_open", {}), _note("b", "a")),
    ),
    Case("text before a call", (("list_open", {}),), text="Let me look first."),
    Case(
        "text in lines before two calls",
        (("list_open", {}), ("search", {"query": "x"})),
        text="I will:\n1. look\n2. search",
    ),
)
XML_CASES = tuple(
    Case(f"ends of XML in an argument, {n}", (_note(text),))
    for n, text in enumerate(XML_LOOKALIKES, 1)
)
THINKING_CASES = (
    Case("thinking before a call", (("list_open", {}),), thought="The user wants to see it."),
    Case(
        "thinking in lines before two calls",
        (("list_open", {}), ("search", {"query": "x"})),
        thought='First I look.\n\nThen I search: it\'s "x".',
    ),
    Case(
        "thinking and text before a call",
        (("search", {"query": "x", "limit": 3}),),
        text="Searching.",
        thought="Three will do.",
    ),
)
# A policy that thinks aloud of a call has not made it.
THOUGHT_OF_CALLS = Case(
    "thinking that spells calls",
    (("list_open", {}),),
    thought='Shall I write {"name": "move", "parameters": {"x": 1, "y": 1}} or <tool_call>{"name":'
    ' "move", "arguments": {"x": 1, "y": 1}}</tool_call> or [TOOL_CALLS]move[ARGS]{} ? No.',
)
