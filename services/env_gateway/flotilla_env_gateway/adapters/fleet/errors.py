"""The meaning of errors of Fleet's control plane: wait, retry, or give up with a reason. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from flotilla_common.text.parsing import ParseError, parse_json
from flotilla_env_gateway.adapters.http_client import DEFAULT_LIMITS, HttpError
from flotilla_env_gateway.ports import BAD_TASK, BackendError

# Refusals that a repeated request meets again, unless the body indicates otherwise.
_INVALID = {400, 401, 402, 403, 405, 410, 413, 422}
# What the task names, and Fleet does not have: the texts by which its SDK tells these cases apart.
_UNKNOWN = re.compile(r"\b(?:environment|version|data(?:[ _](?:id|key))?)\b.*\bnot found\b", re.I)
_PLACEMENT_FAILED = "seed_placement_failed"
_BUSY = ("too many in-flight", "rate limit")
_NESTING = 6
# For a body that is truncated or otherwise not JSON.
_RETRYABLE = re.compile(r'\\*"retryable\\*"\s*:\s*(true|false)')


class FleetError(BackendError):
    """An error that the control plane answered with `status`."""

    def __init__(self, kind: str, message: str, *, http: HttpError, invalid: bool) -> None:
        super().__init__(
            kind,
            message,
            delivered=http.delivered,
            retry_after_s=http.retry_after_s,
            invalid=invalid,
            unreachable=http.unreachable,
        )
        self.status = http.status
        self.body = http.body


class NotFoundError(FleetError):
    """The control plane does not know what a request names: a 404."""


def classify_error(error: HttpError) -> FleetError:
    """Classify an error as the gateway should treat it, with Fleet's explanation as its message."""
    make = NotFoundError if error.status == 404 else FleetError
    details = list(_find_objects(error.body))
    message = _format_message(error, details)
    is_retryable = _find_retryable(error.body, details)
    if error.status == 401:
        message += "; check the API key that env_gateway.backends.fleet.api_key_env names"
        return FleetError("auth", message, http=error, invalid=True)
    if _is_over_limit(error, details):
        return make("throttled", message, http=error, invalid=False)
    if is_retryable is not None:
        return make(
            "retryable" if is_retryable else "refused",
            message,
            http=error,
            invalid=not is_retryable,
        )
    kind = "refused" if error.status in _INVALID else error.kind
    kind = BAD_TASK if error.status == 400 and _UNKNOWN.search(message) else kind
    return make(kind, message, http=error, invalid=error.status in _INVALID)


def _find_objects(text: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield every JSON object in a body, including those in strings: Fleet nests its components'
    errors that way."""
    start, end = text.find("{"), text.rfind("}")
    if depth > _NESTING or start < 0 or end < start:
        return
    try:
        value = parse_json(text[start : end + 1], DEFAULT_LIMITS)
    except ParseError:
        return
    yield from _walk_value(value, depth)


def _walk_value(value: object, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth > _NESTING:
        return
    if isinstance(value, str):
        yield from _find_objects(value, depth + 1)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        yield fields
        for item in fields.values():
            yield from _walk_value(item, depth + 1)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _walk_value(item, depth + 1)


def _find_retryable(body: str, details: list[Mapping[str, Any]]) -> bool | None:
    """Return whether the body allows a retry; None if it does not mention retries."""
    for fields in details:
        if isinstance(is_retryable := fields.get("retryable"), bool):
            return is_retryable
        if _PLACEMENT_FAILED in (fields.get("error"), fields.get("error_type")):
            return True
    match = _RETRYABLE.search(body)
    return None if match is None else match[1] == "true"


def _is_over_limit(error: HttpError, details: list[Mapping[str, Any]]) -> bool:
    if error.status == 429:
        return True
    text = error.body.lower()
    full = any(fields.get("error_type") == "instance_limit_exceeded" for fields in details)
    if error.status == 403:
        return full or "instance limit" in text
    return any(phrase in text for phrase in _BUSY)


def _format_message(error: HttpError, details: list[Mapping[str, Any]]) -> str:
    for fields in details:
        for name in ("message", "detail"):
            if isinstance(text := fields.get(name), str) and text:
                return f"HTTP {error.status}: {text[:500]}"
    return f"HTTP {error.status}: {error.body[:500]}"
