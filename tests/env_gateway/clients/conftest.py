from collections.abc import Iterator

import pytest

from tests.env_gateway.clients.fleet_task_envs import Here
from tests.support.threaded_gateway import served


@pytest.fixture
def here() -> Iterator[Here]:
    """A gateway in a thread of this process, and FleetTaskEnvs that reach it."""
    with served() as gateway:
        here = Here(gateway)
        yield here
        here.wait_until_closed()
