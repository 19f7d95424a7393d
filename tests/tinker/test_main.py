import re

import pytest

from services.common.rpc.errors import ConfigError
from services.tinker.__main__ import client_flags, read_keys
from services.tinker.config.tinker import TinkerConfig

KEY = "tml-0123456789abcdef"


def test_keys_come_from_their_variables() -> None:
    assert read_keys({"alice": "$A"}, {"A": f"{KEY}\n"}) == {"alice": KEY}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "tinker.keys.alice: $A must hold a key of at least 16 characters"),
        ({"A": "sk-0123456789abcdef"}, "begins with tml-"),
        ({"A": "tml-short"}, "at least 16 characters"),
    ],
)
def test_a_key_that_no_client_could_send_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_keys({"alice": "$A"}, environ)


def test_two_names_cannot_share_a_key() -> None:
    with pytest.raises(ConfigError, match="two names have the same key"):
        read_keys({"alice": "$A", "bob": "$B"}, {"A": KEY, "B": KEY})


def test_clients_are_told_the_limits() -> None:
    config = TinkerConfig.model_validate(
        {"keys": {"a": "$A"}, "limits": {"body_bytes": 2**20, "samples": 7}}
    )

    assert client_flags(config) == {
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_bytes_count": 2**19,
        "sample_max_concurrent_requests": 7,
    }
