"""Variables that are taken for secrets, and the secret part of each."""

import base64
import html
import json
import re
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from flotilla_common.text.redaction import (
    find_references,
    is_secret_name,
    secret_values,
    written_forms,
)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("NEBIUS_CREDENTIALS_JSON", True),
        ("FLOTILLA_REMOTE_OPTIONS", True),
        ("SLURM_JWT", True),
        ("DB_PASS", True),
        ("MYSQL_PWD", True),
        ("SSH_PASSPHRASE", True),
        ("KEYBOARD", False),
        ("OLDPWD", False),
        ("COMPASS", False),
        ("PATH", False),
    ],
)
def test_a_name_shows_whether_its_value_is_a_secret(name: str, secret: bool) -> None:
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


def test_what_opens_the_way_to_a_url_counts_whatever_the_variable_is_called() -> None:
    found = secret_values(
        {
            "DATABASE_URL": "postgres://app:p%40ssw0rd-of-mine@db:5432/runs",
            "GIT_REMOTE": "https://ghp_0123456789@git.example.org/repo",
            "BROKER": "amqp://guest:short@mq",
            "STORE": "Endpoint=https://s.example.org;AccountKey=0123456789abcdef==;Protocol=https",
            "SIGNED": "https://s.example.org/blob?sp=r&sig=abcdefgh%2Fijkl",
            "PLAIN": "https://example.org/a-long-path?page=12345678",
            "PAGES": "pagesize_key=12345678",
        }
    )
    assert {
        *("p%40ssw0rd-of-mine", "p@ssw0rd-of-mine", "ghp_0123456789", "guest:short@"),
        *("0123456789abcdef==", "abcdefgh%2Fijkl", "abcdefgh/ijkl"),
    } <= found.keys()
    assert set(found.values()) == {"DATABASE_URL", "GIT_REMOTE", "BROKER", "STORE", "SIGNED"}


@pytest.mark.parametrize("secret", ["0123456789", 'sk-/quoted+"and\\back=', "pässwört 🙂 12"])
@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("after", ["", "z", "zz"])
def test_a_secret_is_known_in_whatever_is_made_of_the_text_around_it(
    secret: str, before: str, after: str
) -> None:
    whole = before + secret + after
    raw = whole.encode()
    written = {
        "plain": whole,
        "JSON": json.dumps(whole),
        "JSON, not ASCII": json.dumps(whole, ensure_ascii=False),
        "URL": quote(whole, safe=""),
        "URL, lower case": re.sub("%..", lambda found: found[0].lower(), quote(whole, safe="")),
        "path": quote(whole),
        "form": quote_plus(whole),
        "base64": base64.b64encode(raw).decode(),
        "base64 of URLs": base64.urlsafe_b64encode(raw).decode(),
        "hexadecimal": raw.hex(),
        "hexadecimal, upper case": raw.hex().upper(),
        "Python's": repr(whole),
        "Python's bytes": repr(raw),
        "JSON in JSON": json.dumps(json.dumps(whole)),
        "every byte of a URL": "".join(f"%{byte:02X}" for byte in raw),
        "HTML": html.escape(whole),
    }
    known = written_forms(secret)
    assert [how for how, text in written.items() if not any(f in text for f in known)] == []
    assert min(map(len, known)) >= len(secret), "so little would hide ordinary text"


def test_names_in_a_spec_are_found_wherever_they_stand() -> None:
    section = {"a": "$ONE", "b": [{"c": "$TWO_2"}, "x $THREE"], "d": 1, "e": "$four"}
    assert list(find_references(section)) == ["ONE", "TWO_2"]
