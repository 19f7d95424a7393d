from collections.abc import Iterator

import pytest

from tests.env_gateway.backends.fleet_harness import Emulator
from tests.env_gateway.fleet_task_envs import Here
from tests.env_gateway.threaded import served


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    """One emulated Fleet that the tests of a file share."""
    emulator = Emulator()
    emulator.start()
    yield emulator
    emulator.stop()


@pytest.fixture
def here() -> Iterator[Here]:
    """A gateway in a thread of this process, and FleetTaskEnvs that reach it."""
    with served() as gateway:
        here = Here(gateway)
        yield here
        here.wait_until_closed()
