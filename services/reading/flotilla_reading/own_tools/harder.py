"""Harder tasks: a model names the calls, which are played and checked like those that are sampled.
Pure.

What a model writes is taken only if these tools can be called so, and if its values may stand in a
prompt."""

import json
import re
from typing import Any, cast

from flotilla_reading.own_tools.exploration import Surroundings
from flotilla_reading.own_tools.values import is_harmless, leaves_of
from flotilla_reading.play.solutions import SolutionCall

# One more than the longest that is sampled, and what a small model may still do.
_FEWEST, _MOST = 4, 6
_MOST_DESCRIPTION, _MOST_SCHEMA, _MOST_STATE = 300, 2000, 4000
_ASK = (
    "These tools change a small world:\n{tools}\n\nThis is what it shows before:\n{state}\n\n"
    "Think of one errand that takes {fewest} to {most} calls of these tools and is hard to get"
    " right: later calls need what earlier ones made, and each call changes something that stays."
    " One of the calls is of {tool}. Names and texts are short and plain. It is errand {number} of"
    " many, so choose other things than the first that come to mind."
    ' Answer with the calls alone, as a JSON array of {{"tool": NAME, "arguments": OBJECT}}.'
)


def ask_for_calls(found: Surroundings, number: int) -> list[dict[str, str]]:
    """Return the conversation that asks a model for the calls of a task, another one for each
    number."""
    writers = found.writers
    tools = "\n".join(
        f"- {tool.name}: {tool.description[:_MOST_DESCRIPTION]}\n"
        f"  arguments: {json.dumps(tool.schema)[:_MOST_SCHEMA]}"
        for tool in writers
    )
    shown = (
        f"{probe.identity}: {' '.join('...'.join(texts) for texts in pattern or ())}"
        for probe, pattern in zip(found.probes, found.baseline, strict=True)
    )
    asked = _ASK.format(
        tools=tools,
        state="\n".join(shown)[:_MOST_STATE],
        fewest=_FEWEST,
        most=_MOST,
        tool=writers[number % len(writers)].name,
        number=number + 1,
    )
    return [{"role": "user", "content": asked}]


def read_calls(text: str, found: Surroundings) -> list[SolutionCall] | str:
    """Return the calls that a model has written, or why they cannot be played."""
    array = re.search(r"\[.*\]", text, re.DOTALL)
    try:
        items: Any = json.loads(array[0]) if array else None
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list):
        return "they are no JSON array"
    entries = cast("list[Any]", items)
    if not _FEWEST <= len(entries) <= _MOST:
        return f"they are not {_FEWEST} to {_MOST} calls"
    schemas = {tool.name: tool.schema for tool in found.writers}
    calls: list[SolutionCall] = []
    for entry in entries:
        match entry:
            case {"tool": str(name), "arguments": dict(given), **others} if not others:
                arguments = cast("dict[str, Any]", given)
            case _:
                return "one is not of a tool and its arguments"
        if name not in schemas or set(arguments) - set(schemas[name].get("properties") or ()):
            return "one is of a tool or an argument that there is not"
        texts = (value for _, value in leaves_of(arguments) if isinstance(value, str))
        if not all(is_harmless(text) for text in texts):
            return "a value may not stand in a prompt"
        calls.append(SolutionCall(name, arguments))
    return calls
