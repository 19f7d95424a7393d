"""Messages of a sequence, as they travel and are stored."""

import json
from typing import Any

import pytest

from flotilla_common.domain.messages import (
    MOST_MESSAGES,
    ChatCall,
    ChatMessage,
    MessagesError,
    TokenText,
    check_messages,
    decode_messages,
    encode_messages,
)

TOLD = (
    ChatMessage("system", 4, TokenText(1, 3, 2, 1), by_template=True),
    ChatMessage("user", 9, "not in tokens"),
    ChatMessage("assistant", 20, "", TokenText(10, 15), (ChatCall("c", "look", "{}"),)),
    ChatMessage("tool", 20, "never seen", "", (), "c", "look", "tool_error", ("aa",)),
)


def check(*rows: dict[str, Any], begin: int = 0, end: int = 20) -> None:
    check_messages(json.dumps(rows).encode(), begin, end, ["aa"])


def test_messages_come_back_as_they_were_and_cover_the_tokens() -> None:
    data = encode_messages(TOLD)
    assert decode_messages(data) == TOLD
    check_messages(data, 0, 20, ["aa"])
    assert json.loads(data)[0] == {
        **{"role": "system", "end": 4, "content": [1, 3, 2, 1], "by_template": True}
    }
    assert json.loads(data)[1] == {"role": "user", "end": 9, "content": "not in tokens"}


def test_no_messages_are_no_bytes() -> None:
    assert encode_messages(()) == b""
    assert decode_messages(b"") == ()
    check_messages(b"", 3, 20)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"role": "user", "end": 19}], "messages cover tokens up to 19; there are 20"),
        ([{"role": "user", "end": 21}], r"messages\[0\] ends at token 21, not within 0..20"),
        (
            [{"role": "user", "end": 9}, {"role": "tool", "end": 8}],
            r"messages\[1\] ends at token 8, not within 9..20",
        ),
        ([{"role": "user", "end": 20, "content": [3, 21]}], r"messages\[0\] has its content in"),
        ([{"role": "user", "end": 20, "content": [4, 3]}], r"messages\[0\] has its content in"),
        ([{"role": "user", "end": 20, "thinking": [-1, 3]}], r"messages\[0\] has its thinking in"),
        ([{"role": "user", "end": 20, "media": ["aa", "bb"]}], "media that the sequence lacks"),
        ([{"role": "judge", "end": 20}], r"Invalid enum value 'judge' - at `\$\[0\].role`"),
        ([{"role": "user", "end": 20, "says": ""}], "unknown field `says`"),
        ([{"role": "user"}], "missing required field `end`"),
    ],
)
def test_what_does_not_fit_the_tokens_is_refused_by_name(
    rows: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(MessagesError, match=problem):
        check(*rows)


def test_what_is_no_list_of_messages_is_refused() -> None:
    for data in (b"{", b"\xff", b"[" * 100_000, b'{"role": "user", "end": 20}', b"[1]"):
        with pytest.raises(MessagesError, match="messages: "):
            decode_messages(data)
    with pytest.raises(MessagesError, match="16385 messages; at most 16384"):
        check(*[{"role": "user", "end": 20}] * (MOST_MESSAGES + 1))
