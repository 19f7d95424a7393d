from collections.abc import Iterator

import pytest

from tests.env_gateway.backends.fleet_harness import Emulator
from tests.env_gateway.fleet_task_envs import Here
from tests.env_gateway.threaded import served
from tests.env_gateway.wire import Wire, check_unharmed, opened_wire


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


@pytest.fixture(scope="module")
def shared_wire() -> Iterator[Wire]:
    with opened_wire() as wire:
        yield wire


@pytest.fixture
def wire(shared_wire: Wire) -> Iterator[Wire]:
    """A gateway to send anything to, which must be none the worse for it."""
    yield shared_wire
    check_unharmed(shared_wire)
