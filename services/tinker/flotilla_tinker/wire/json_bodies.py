"""Reading of JSON bodies, bounded, into their structs; and the results that are JSON."""

from functools import cache
from typing import Any, TypeVar

import msgspec

from flotilla_common.text.parsing import ParseError, TextLimits, check_json
from flotilla_tinker.types import Kind, Result
from flotilla_tinker.wire.wire_error import WireError

JSON = "application/json"
_LIMITS = TextLimits(bytes=64 * 2**20, values=8_000_000, depth=32)
B = TypeVar("B", bound=msgspec.Struct)


def read_json(body: bytes, cls: type[B]) -> B:
    """Read a request. A field that this server does not know is refused, unless it is empty: newer
    clients send theirs with their defaults. Raises WireError."""
    try:
        check_json(body, _LIMITS)
        try:
            return _make_decoder(cls).decode(body)
        except msgspec.ValidationError:
            return _read_newer(body, cls)
    except (ParseError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the body is not this request: {error}") from error


@cache
def _make_decoder(cls: type[B]) -> "msgspec.json.Decoder[B]":
    return msgspec.json.Decoder(cls)


def _read_newer(body: bytes, cls: type[B]) -> B:
    value: Any = msgspec.json.decode(body)
    if isinstance(value, dict):
        known = cls.__struct_encode_fields__
        value = {name: item for name, item in value.items() if item or name in known}
    return msgspec.convert(value, cls)


def write_json(kind: Kind, **fields: Any) -> Result:
    """Write the result of a future that has no arrays."""
    return Result(msgspec.json.encode({**fields, "type": kind}), JSON)
