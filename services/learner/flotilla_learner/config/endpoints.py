"""Keys of a spec about an endpoint of others: where it is, and which variable holds its secret."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

from flotilla_common.rpc.errors import ConfigError

_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")
_VARIABLE = re.compile(r"\$[A-Z][A-Z0-9_]*")


def _is_of_an_endpoint(url: str) -> str:
    if not _URL.fullmatch(url):
        raise ValueError(
            "expected the URL of an endpoint, such as http://10.0.0.7:8000/v1, without user and"
            " password"
        )
    return url.rstrip("/")


def _is_a_reference(key: str) -> str:
    if not _VARIABLE.fullmatch(key):
        raise ValueError(
            'name the variable that holds the key, as in api_key = "$ENDPOINT_API_KEY"; a key has'
            " no place in a spec"
        )
    return key


# Where an OpenAI-compatible API begins, without the last slash.
EndpointUrl = Annotated[str, AfterValidator(_is_of_an_endpoint)]
# `$NAME` of a variable.
KeyReference = Annotated[str, AfterValidator(_is_a_reference)]


def read_key(reference: str | None, name: str) -> str:
    """Return the secret that the key `name` of the spec refers to; "" without a reference. Raises
    ConfigError."""
    if reference is None:
        return ""
    key = os.environ.get(reference[1:], "")
    if not key:
        raise ConfigError(
            f"{name} is {reference}, which is not set in the environment; export it, or take it out"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{name}: {reference} has characters that no header can have")
    return key
