"""Removal of secrets from a run spec that is shown to others."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_common.text.redaction import find_references, redact

_SECRET_KEY = re.compile(
    r"(^|_)(token|secret|password|credentials?|authorization|api_?key|webhook)$", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def redact_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec` without values whose keys suggest secrets, known secrets, and logins in
    URLs. The name of a variable with a secret, `$NAME`, is none."""
    return {key: _HIDDEN if _is_secret(key, v) else _redact_value(v) for key, v in spec.items()}


def _is_secret(key: str, value: Any) -> bool:
    is_name = isinstance(value, str) and any(find_references(value))
    return _SECRET_KEY.search(key) is not None and not is_name


def _redact_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact_spec(value)
    if isinstance(value, str):
        return _LOGIN.sub(_HIDDEN, redact(value))
    if isinstance(value, Sequence):
        return [_redact_value(item) for item in value]
    return value
