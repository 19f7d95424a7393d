"""Messages of tools' answers, with places for their pictures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["tool", "user"]


@dataclass(frozen=True, slots=True)
class ShownReply:
    """The text that the policy reads after one call, and the number of pictures after the text."""

    name: str
    call_id: str
    text: str
    pictures: int = 0


def make_content(pieces: Iterable[tuple[str, int]]) -> str | list[dict[str, str]]:
    """Return the content of a message of texts, each with a number of pictures after it: one text
    if there are no pictures, which every template takes."""
    parts = list[dict[str, str]]()
    pictures = 0
    for text, shown in pieces:
        parts += [{"type": "text", "text": text}] if text else []
        parts += [{"type": "image"}] * shown
        pictures += shown
    return parts if pictures else "".join(part["text"] for part in parts)


def make_reply_messages(
    replies: Sequence[ShownReply], role: Role, *, apart: bool = False
) -> list[dict[str, Any]]:
    """Return replies as messages: a user's are one, tools' one each. If `apart`, the pictures of
    tools are in a user's message after them all, as families are shown them whose template leaves
    them out."""
    if role == "user":
        content = make_content((reply.text, reply.pictures) for reply in replies)
        return [{"role": "user", "content": content}]
    messages = list[dict[str, Any]]()
    for reply in replies:
        content = make_content([(reply.text, 0 if apart else reply.pictures)])
        named = {"name": reply.name, "tool_call_id": reply.call_id}
        messages.append({"role": "tool", "content": content, **named})
    if apart and (pictures := sum(reply.pictures for reply in replies)):
        messages.append({"role": "user", "content": make_content([("", pictures)])})
    return messages
