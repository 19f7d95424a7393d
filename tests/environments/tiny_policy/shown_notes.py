"""Demonstrations of two tools for notes, as `flotilla init` writes them."""

import json
from typing import Any

from flotilla_common.episodes.conversations import Conversation
from flotilla_reading.demonstrations.conversation_rows import read_row

NAMES = ("amber", "basil", "cedar", "daisy", "ember", "fern", "grove", "hazel")


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [_tool("write_note", "path", "content"), _tool("drop_note", "path")]


def shown_row(key: str, prompt: str, *calls: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    """Return a row of a file of conversations: calls with their answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    for number, (name, arguments, answer) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
    messages.append({"role": "assistant", "content": "Done."})
    return {"messages": messages, "tools": TOOLS, "key": key}


def note_rows() -> list[dict[str, Any]]:
    """Return a row for each name: it writes a note, and every other one drops another first."""
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(NAMES):
        other = NAMES[number - 1]
        text = f"no {other} milk"
        write = "write_note", {"path": f"notes/{name}.md", "content": text}, f"{name} is written"
        drop = "drop_note", {"path": f"notes/{other}.md"}, "dropped"
        prompt = f'Write "{text}" into the note notes/{name}.md.'
        if number % 2:
            prompt = f"Drop notes/{other}.md. Then w{prompt[1:]}"
        rows.append(shown_row(f"note-{name}", prompt, *([drop] * (number % 2)), write))
    return rows


def to_conversation(row: dict[str, Any]) -> Conversation:
    found = read_row(row, "notes", "line 1")
    assert found is not None
    return found
