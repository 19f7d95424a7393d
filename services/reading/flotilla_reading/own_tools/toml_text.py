"""Values as TOML on one line, from what others have written. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def quote(text: str) -> str:
    """Return a text as TOML. What JSON leaves as it is and TOML forbids are DEL and lone
    surrogates."""
    written = json.dumps(text.encode(errors="replace").decode(), ensure_ascii=False)
    return written.replace("\x7f", "\\u007f")


def to_toml(value: Any) -> str:
    """Return a text, a number, a list or a table."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{quote(k)} = {to_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(to_toml, value))}]"
    return quote(value) if isinstance(value, str) else json.dumps(value)
