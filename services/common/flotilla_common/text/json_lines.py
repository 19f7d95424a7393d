"""Messages between processes: a dataclass, or plain values, as one line of JSON."""

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def encode_line(message: Any) -> bytes:
    """Encode an instance of a dataclass, or JSON."""
    return json.dumps(_adapter(type(message)).dump_python(message, mode="json")).encode() + b"\n"


def decode_line(kind: type[T], line: bytes) -> T:
    """Decode an instance of `kind`. Raises ValueError, without the line, which may hold secrets."""
    try:
        return _adapter(kind).validate_json(line)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        raise ValueError(f"not a {kind.__name__}: {problems}") from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
