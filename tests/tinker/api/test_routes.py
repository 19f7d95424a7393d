"""The calls of the SDK itself: `sdk_calls.json` has what 0.38.0 sent, one of each kind. (Names of
checkpoints were changed to those of the tests' desk.)"""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flotilla_tinker.api.routes import PREFIX, ROUTES
from tests.tinker.api.conftest import ServedDesk

CALLS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("sdk_calls.json").read_text())


def _read_body(body: Any) -> bytes:
    if body is None:
        return b""
    if "base64" in body:
        return base64.b64decode(body["base64"])
    return msgspec.json.encode(body)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["call"])
async def test_a_call_of_the_sdk_is_answered(served: ServedDesk, call: dict[str, Any]) -> None:
    (route,) = (each for each in ROUTES if each.handle.__name__ == call["call"])
    answer = await served.http.request(
        route.method,
        f"{PREFIX}{route.path.format(**call['path'])}",
        params=call["query"],
        content=_read_body(call["body"]),
    )

    assert answer.status_code == 200, answer.text


def test_no_two_routes_are_alike() -> None:
    places = [(route.method, route.path) for route in ROUTES]

    assert len(set(places)) == len(places)
