"""Removal of secrets from logs and other text that people read.

Secrets are registered from environment variables, by name (`secret_values`), or one by one
(`add_secret`). `redact` hides them in a text in any encoding, `clean_value` in a field of a log
line."""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, cast
from urllib.parse import quote, quote_plus, unquote, urlsplit

_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL|WEBHOOK"
_NAME = re.compile(f"({_WORDS}|JWT|PASSPHRASE|(^|_)PASS|_PWD)S?(_|$)", re.IGNORECASE)
# Objects that contain secrets although their names do not show it.
_OBJECTS = ("FLOTILLA_LAUNCHER", "FLOTILLA_REMOTE_OPTIONS", "FLOTILLA_TLS")
_IN_OBJECT = re.compile(f"{_WORDS}|TLS", re.IGNORECASE)
_USER = re.compile(r"://([^\s:/?#@]*)(:?)([^\s/?#@]*)@")
_SETTING = re.compile(
    r"(?:token|secret|passw(?:or)?d|pwd|signature|[?&]sig"
    r"|(?:api|account|access|private)[-_]?(?:access[-_]?)?key)=([^\s;&\"']+)",
    re.IGNORECASE,
)
_ESCAPE = re.compile("%[0-9A-F]{2}")
_URL_ALPHABET = str.maketrans("+/", "-_")
_REFERENCE = re.compile(r"\$([A-Z][A-Z0-9_]*)")
# A shorter secret would hide ordinary text.
_MIN_CHARACTERS = 8
_MAX_VALUE_CHARACTERS = 4 * 1024
_SECRET_FIELD = re.compile(r"^(token|authorization|password|secret|.*api_key)$", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\bbearer\s+[^\s\"'\\,;]+")
_PASSWORD = re.compile(r"://[^\s:/?#@\"']*:[^\s/?#@\"']+@")
_HIDDEN = "***"

# Secrets registered so far; a later one is hidden from then on.
_secrets: set[str] = set()
_hidden: list[str] = []


def add_secret(value: str) -> None:
    """Hide `value` in log lines, unless it is so short that it would hide ordinary text."""
    if len(value) >= _MIN_CHARACTERS and value not in _secrets:
        _secrets.add(value)
        # Longest first, because one may be part of another.
        _hidden[:] = sorted({*_hidden, *written_forms(value)}, key=len, reverse=True)


def redact(text: str) -> str:
    """Return `text` without known secrets in any encoding, bearer tokens, and passwords of URLs."""
    for form in _hidden:
        text = text.replace(form, _HIDDEN)
    return _PASSWORD.sub(f"://{_HIDDEN}@", _BEARER.sub(f"Bearer {_HIDDEN}", text))


def redact_bytes(data: bytes) -> bytes:
    """Return binary data with known secrets overwritten; its length stays, as file formats need."""
    for form in _hidden:
        raw = form.encode("utf-8", "surrogatepass")
        data = data.replace(raw, b"*" * len(raw))
    return data


def clean_value(key: str, value: Any) -> Any:
    """Make a value fit for a line. Secrets are hidden first: a cut could leave half of one."""
    if _SECRET_FIELD.match(key):
        return _HIDDEN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        value = value[:_MAX_VALUE_CHARACTERS].hex()
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    clean = redact(text)
    if len(clean) > _MAX_VALUE_CHARACTERS:
        cut = len(clean) - _MAX_VALUE_CHARACTERS
        return f"{clean[:_MAX_VALUE_CHARACTERS]}... ({cut} characters cut)"
    return clean if isinstance(value, str) else _load_cleaned(clean)


def _load_cleaned(clean: str) -> Any:
    """Return the value, or its text if hiding a secret broke the JSON, as for a secret of digits
    outside a string."""
    try:
        return json.loads(clean)
    except ValueError:
        return clean


def is_secret_name(name: str) -> bool:
    """Return True if a variable's name shows that its value is a secret."""
    return name in _OBJECTS or _NAME.search(name) is not None


def find_references(value: object) -> Iterator[str]:
    """Yield the names of the variables that a part of a spec takes secrets from.

    A reference is `$NAME` as a whole string, at any depth."""
    if isinstance(value, str):
        found = _REFERENCE.fullmatch(value)
        if found is not None:
            yield found[1]
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, object]", value).values():
            yield from find_references(item)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from find_references(item)


def secret_values(environ: Mapping[str, str], also: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the texts to hide, longest first, and the variable that each comes from.

    `also` lists secret variables whose names do not show it. From any other variable only embedded
    credentials count, such as the password in DATABASE_URL."""
    found: dict[str, str] = {}
    for name, value in environ.items():
        whole = is_secret_name(name) or name in also
        parts = _parts(name, value) if whole else find_credentials(value)
        found.update(dict.fromkeys(parts, name))
    return {text: found[text] for text in sorted(found, key=len, reverse=True)}


def find_credentials(text: str) -> Iterator[str]:
    """Yield the credentials of URLs and settings in a text: passwords, tokens used as a user name,
    and both together."""
    for user, colon, password in _USER.findall(text):
        secret = password if colon else user
        written = (secret, unquote(secret), f"{user}{colon}{password}@")
        yield from (each for each in written if len(each) >= _MIN_CHARACTERS)
    for secret in _SETTING.findall(text):
        yield from {each for each in (secret, unquote(secret)) if len(each) >= _MIN_CHARACTERS}


def written_forms(secret: str) -> frozenset[str]:
    """Return all forms that a secret may be written in.

    These are plain, quoted for JSON, Python, HTML and URLs, hexadecimal, and base64 at each of the
    three byte offsets."""
    raw = secret.encode(errors="surrogatepass")
    bytewise = "".join(f"%{byte:02X}" for byte in raw)
    quoted = (quote(raw, safe=""), quote(raw), quote_plus(raw), bytewise)
    lower = (_ESCAPE.sub(lambda found: found[0].lower(), each) for each in quoted)
    encoded = (_in_base64(raw, before) for before in range(3))
    both = (each.translate(alphabet) for each in encoded for alphabet in ({}, _URL_ALPHABET))
    in_hex = raw.hex()
    return frozenset(
        {secret, *_in_source(secret, raw), *quoted, *lower, in_hex, in_hex.upper(), *both}
    )


def _in_source(secret: str, raw: bytes) -> Iterator[str]:
    """Yield a secret as it is written in string literals, and in JSON nested in a JSON string."""
    for ascii_only in (True, False):
        once = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        yield from (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1])
    # After a leading quote, repr escapes the other kind.
    yield from (repr(secret)[1:-1], repr(f'"{secret}')[2:-1], repr(raw)[2:-1])
    yield from (escape(secret), escape(secret, quote=False))


def _in_base64(raw: bytes, before: int) -> str:
    """Return the characters that depend only on the secret, after `before` bytes of a triple."""
    whole = base64.b64encode(bytes(before) + raw).decode()
    first, last = -(-before * 8 // 6), (before + len(raw)) * 8 // 6
    return whole[first:last]


def _parts(name: str, value: str) -> Iterator[str]:
    """Yield the value, its secrets if it is a JSON object, and the parts of a URL that servers
    repeat."""
    # The path of a secret is not secret.
    if os.path.exists(value):
        return
    for text in (value, *_of_object(name, value), *_of_url(value), *find_credentials(value)):
        if len(text) >= _MIN_CHARACTERS:
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
