"""Every method of Tinker's client works, or is refused in words that say what to do instead."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tinker.client.methods import (
    LOCAL,
    METHODS,
    NOT_OURS,
    World,
    call_method,
    make_world,
    public_methods,
)
from tests.tinker.client.served import Served, client_of, client_tests, tinker
from tests.tinker.client.support_page import read_methods

pytestmark = client_tests


@pytest.fixture(scope="module")
def world(served: Served) -> Iterator[World]:
    with client_of(served) as client:
        yield make_world(client, tinker.RestClient(base_url=served.url, api_key=served.key))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_does_what_the_page_says(name: str, world: Any) -> None:
    assert call_method(name, world) == read_methods()[name]


def test_the_page_knows_every_method(stage: Any) -> None:
    asked = {name.partition(",")[0] for name in METHODS}
    assert public_methods() == asked | NOT_OURS | LOCAL
