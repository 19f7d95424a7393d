"""The messages of an episode in the markup of ChatML, as its rollout would have recorded them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace
from tokenizers import Encoding

from flotilla_common.domain.messages import ChatCall, ChatMessage, TokenText, encode_messages
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Media

_SHOWN = re.compile(
    r"<\|im_start\|>(?P<role>system|user)\n(?P<tool><tool_response>\n)?(?P<content>.*?)"
    r"(?:\n</tool_response>)?<\|im_end\|>",
    re.DOTALL,
)
_SAMPLED = re.compile(
    r"(?P<content>.*?)(?:<tool_call>\n(?P<call>.*)\n</tool_call>)?(?:<\|im_end\|>)?", re.DOTALL
)


def record_messages(
    parts: Iterable[tuple[Author, str]],
    encode: Callable[[str], Encoding],
    media: Sequence[Media] = (),
) -> bytes:
    """Return the encoded messages of an episode's parts, each tokenised by itself."""
    found, start = list[ChatMessage](), 0
    for author, text in parts:
        encoding = encode(text)
        size = len(encoding.ids)
        read = _read_turn if author is Author.POLICY else _read_shown
        called = [call for each in found[-1:] for call in each.calls]
        for message in read(text, encoding, start, len(found), called):
            own = [each.sha256 for each in media if start <= each.token_offset < start + size]
            shown = () if message.role in ("system", "assistant") else own
            found.append(replace(message, media=tuple(shown)))
        start += size
    if found:
        found[-1] = replace(found[-1], end=start)
    return encode_messages(found)


def _read_shown(
    text: str, encoding: Encoding, start: int, place: int, called: Sequence[ChatCall]
) -> Iterator[ChatMessage]:
    calls = iter(called)
    for match in _SHOWN.finditer(text):
        content = _tokens_of(encoding, match.span("content"), start)
        if match["tool"]:
            call = next(calls, ChatCall("", "", "{}"))
            yield ChatMessage(
                "tool", content.end, content, call_id=call.id, name=call.name, outcome="ok"
            )
        else:
            yield ChatMessage("user" if match["role"] == "user" else "system", content.end, content)


def _read_turn(
    text: str, encoding: Encoding, start: int, place: int, called: Sequence[ChatCall]
) -> Iterator[ChatMessage]:
    match = _SAMPLED.fullmatch(text)
    assert match is not None
    calls = ()
    if match["call"]:
        call = json.loads(match["call"])
        calls = (ChatCall(f"call_{place}_0", call["name"], json.dumps(call["arguments"])),)
    content = _tokens_of(encoding, match.span("content"), start)
    yield ChatMessage("assistant", start + len(encoding.ids), content, calls=calls)


def _tokens_of(encoding: Encoding, span: tuple[int, int], start: int) -> TokenText:
    """Return the tokens of some characters."""
    begin, end = span
    inside = [n for n, (a, b) in enumerate(encoding.offsets) if b > begin and a < end]
    if not inside:
        return TokenText(start, start)
    first, last = inside[0], inside[-1]
    skip, drop = begin - encoding.offsets[first][0], encoding.offsets[last][1] - end
    return TokenText(start + first, start + last + 1, max(skip, 0), max(drop, 0))
