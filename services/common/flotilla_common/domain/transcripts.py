"""The transcript of an episode for its verifier: JSON lines, within a limit. Pure.

If it is too long, results of tools are replaced by marks, those in the middle first: no length of
an episode costs its grade."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def encode_transcript(messages: Sequence[Message], most_bytes: int) -> bytes:
    """Encode the messages, with marks in place of as many as exceed the limit."""
    if most_bytes <= 0:
        return b""
    lines = [_encode_line(message) for message in messages]
    excess = sum(map(len, lines)) - most_bytes
    for index in _order_of_omission(messages):
        if excess <= 0:
            break
        size = len(lines[index])
        mark = _encode_line(_mark_omission(messages[index], size))
        if len(mark) < size:
            lines[index] = mark
            excess -= size - len(mark)
    while excess > 0 and lines:
        # So many that even their marks are too long.
        excess -= len(lines.pop(len(lines) // 2))
    return b"".join(lines)


def _order_of_omission(messages: Sequence[Message]) -> Sequence[int]:
    """Order the messages: tools' results before all others, each from the middle outwards."""
    middle = len(messages) / 2
    return sorted(
        range(len(messages)),
        key=lambda index: (messages[index].get("role") != "tool", abs(index - middle)),
    )


def _mark_omission(message: Message, size: int) -> Message:
    content = f"[left out of the transcript: {size} bytes]"
    return {"role": message.get("role"), "content": content, "omitted_bytes": size}


def _encode_line(message: Message) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"
