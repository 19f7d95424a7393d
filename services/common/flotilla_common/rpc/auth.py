"""The bearer token that every call carries, loopback included."""

import hmac
import re
from collections.abc import Iterable

import grpc

from flotilla_common.rpc.errors import ConfigError, make_refusal

HEADER = "authorization"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def check_token(token: str) -> str:
    """Return `token` if it can be a bearer token.

    Raises ConfigError, whose message does not repeat the token."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            "the token must be 16-512 characters of A-Z a-z 0-9 . _ ~ + / = - without spaces or"
            " line ends; make one with `python -c 'import secrets; print(secrets.token_hex(32))'`"
            " and pass it in FLOTILLA_TOKEN or --token-file"
        )
    return token


def bearer(token: str) -> str:
    """Return the value of the authorization header."""
    return f"Bearer {check_token(token)}"


class Authenticator:
    """Check that a call carries the run's token, in constant time."""

    def __init__(self, token: str) -> None:
        self._expected = bearer(token).encode()

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raise ServiceError UNAUTHENTICATED unless the right token is present exactly once."""
        given = [value for key, value in metadata if key == HEADER]
        if len(given) == 1:
            value = given[0]
            raw = value.encode() if isinstance(value, str) else value
            if hmac.compare_digest(raw, self._expected):
                return
        if not given:
            message = "no bearer token; set FLOTILLA_TOKEN to the token of this run"
            raise make_refusal(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING", message)
        message = "this bearer token is not that of this run"
        raise make_refusal(grpc.StatusCode.UNAUTHENTICATED, "TOKEN_WRONG", message)
