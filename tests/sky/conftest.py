"""One box with SkyPilot for all tests of a session that need it."""

import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.sky.session import SkySession


@pytest.fixture(scope="session")
def sky_session() -> Iterator[SkySession]:
    """The tests run on its login host: SkyPilot answers there, and so do the nodes."""
    if find_spec("sky") is None:
        pytest.skip("SkyPilot is not in this environment: make test-sky")
    with SkySession() as session, session.inside():
        with warnings.catch_warnings(action="ignore"):
            # SkyPilot uses deprecated parts of its dependencies.
            import_module("sky.jobs")
        yield session
