"""Which environment variables hold secrets, and what of them a text must not repeat."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL|WEBHOOK"
_NAME = re.compile(f"({_WORDS})S?(_|$)", re.IGNORECASE)
# Objects with secrets in them, whose names do not say so.
_OBJECTS = ("FLOTILLA_LAUNCHER", "FLOTILLA_REMOTE_OPTIONS", "FLOTILLA_TLS")
_IN_OBJECT = re.compile(f"{_WORDS}|TLS", re.IGNORECASE)
# Less would hide ordinary text.
MIN_CHARACTERS = 8


def is_secret_name(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return name in _OBJECTS or _NAME.search(name) is not None


def secret_values(environ: Mapping[str, str], also: tuple[str, ...] = ()) -> dict[str, str]:
    """What is to be hidden, longest first, and the variable that each comes from; `also` names
    variables whose names do not say that they are secret."""
    found: dict[str, str] = {}
    for name, value in environ.items():
        if is_secret_name(name) or name in also:
            found.update(dict.fromkeys(_parts(name, value), name))
    return {text: found[text] for text in sorted(found, key=len, reverse=True)}


def _parts(name: str, value: str) -> Iterator[str]:
    """The value, its secrets if it is a JSON object, and what of a URL servers repeat."""
    # Where a secret lies is none.
    if os.path.exists(value):
        return
    for text in (value, *_of_object(name, value), *_of_url(value)):
        if len(text) >= MIN_CHARACTERS:
            yield text


def _of_object(name: str, value: str) -> Iterator[str]:
    if not value.lstrip().startswith("{"):
        return
    try:
        content: Any = json.loads(value)
    except ValueError:
        return
    for key, item in content.items():
        if isinstance(item, str) and (name not in _OBJECTS or _IN_OBJECT.search(key)):
            yield item


def _of_url(value: str) -> Iterator[str]:
    if not value.startswith(("http://", "https://")):
        return
    url = urlsplit(value)
    yield url.path + (f"?{url.query}" if url.query else "")
    yield url.path
    yield url.query
