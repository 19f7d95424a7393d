"""A run spec as others may see it."""

from flotilla_common.spec.public_spec import redact_spec
from flotilla_common.text.redaction import add_secret


def test_a_spec_is_shown_without_its_secrets() -> None:
    add_secret("0123456789abcdef")
    spec = {
        "policy": {"model": "m", "max_tokens": 8, "pack_tokens": 4},
        "learner": {"alarms": {"webhook": "https://hooks.example/T0", "token": "$NAME"}},
        "gateway": {"api_key": "k", "url": "https://me:pw@host/x", "note": "0123456789abcdef"},
        "list": [{"password": "p"}],
    }
    assert redact_spec(spec) == {
        "policy": {"model": "m", "max_tokens": 8, "pack_tokens": 4},
        "learner": {"alarms": {"webhook": "***", "token": "$NAME"}},
        "gateway": {"api_key": "***", "url": "https://***@host/x", "note": "***"},
        "list": [{"password": "***"}],
    }
