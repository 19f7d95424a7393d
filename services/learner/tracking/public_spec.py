"""A run spec as others may see it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.log import redact

_SECRET_KEY = re.compile(
    r"(^|_)(token|secret|password|credentials?|authorization|api_?key|webhook)$", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def public(spec: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` without values whose keys say that they are secret, known secrets, and logins in
    URLs."""
    return {key: _HIDDEN if _SECRET_KEY.search(key) else _plain(v) for key, v in spec.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)
    if isinstance(value, str):
        return _LOGIN.sub(_HIDDEN, redact(value))
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return value
