"""Which variables are taken for secrets, and what of them."""

import json
from pathlib import Path

import pytest

from services.common.secret_values import is_secret_name, secret_values


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("NEBIUS_CREDENTIALS_JSON", True),
        ("FLOTILLA_REMOTE_OPTIONS", True),
        ("KEYBOARD", False),
        ("PATH", False),
    ],
)
def test_a_name_says_whether_its_value_is_a_secret(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_of_objects_and_addresses_the_secret_part_counts_too_and_the_longest_comes_first() -> None:
    options = json.dumps({"secret": "s3cret-of-a-store", "endpoint_url": "http://store:9000"})
    found = secret_values(
        {
            "FLOTILLA_REMOTE_OPTIONS": options,
            "MY_WEBHOOK": "https://hooks.example.org/services/T0/B0",
            "PINGS": "https://pings.example.org/a-long-path",
            "SHORT_TOKEN": "1234567",
        },
        also=("PINGS",),
    )
    assert list(found) == sorted(found, key=len, reverse=True)
    assert {"s3cret-of-a-store", "/services/T0/B0", "/a-long-path"} <= set(found)
    assert "http://store:9000" not in found and "1234567" not in found
    assert found["/a-long-path"] == "PINGS"


def test_where_a_secret_lies_is_none(tmp_path: Path) -> None:
    assert secret_values({"SERVICE_KEY": str(tmp_path)}) == {}
