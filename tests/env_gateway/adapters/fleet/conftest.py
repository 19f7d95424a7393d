from collections.abc import Iterator

import pytest

from tests.env_gateway.backends.fleet_harness import Emulator


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    """One emulated Fleet that the tests of a file share."""
    emulator = Emulator()
    emulator.start()
    yield emulator
    emulator.stop()
