"""Messages between processes arrive as they were sent."""

from dataclasses import dataclass

import pytest
from pydantic import Base64Bytes

from flotilla_common.text.json_lines import decode_line, encode_line


@dataclass(frozen=True, slots=True)
class Inner:
    seconds: float


@dataclass(frozen=True, slots=True)
class Message:
    token: str
    digest: Base64Bytes
    part: Inner


def test_a_message_arrives_whole() -> None:
    sent = Message("t", bytes(range(256)), Inner(float("inf")))
    line = encode_line(sent)
    assert line.count(b"\n") == 1
    assert decode_line(Message, line) == sent


@pytest.mark.parametrize("line", [b"", b"[]", b'{"token": ["secret"], "digest": "secret"}'])
def test_a_malformed_message_is_refused_without_its_content(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a Message") as refused:
        decode_line(Message, line)
    assert "secret" not in str(refused.value)
