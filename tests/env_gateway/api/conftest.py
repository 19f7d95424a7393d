from collections.abc import Iterator

import pytest

from tests.env_gateway.api.raw_wire import Wire, check_unharmed, opened_wire


@pytest.fixture(scope="module")
def shared_wire() -> Iterator[Wire]:
    with opened_wire() as wire:
        yield wire


@pytest.fixture
def wire(shared_wire: Wire) -> Iterator[Wire]:
    """A gateway to send anything to, which must stay intact."""
    yield shared_wire
    check_unharmed(shared_wire)
