from collections.abc import AsyncGenerator, Iterator

import pytest

from tests.env_gateway.backends.bench import Bench, opened_bench
from tests.env_gateway.backends.harness import BackendHarness, Can, harness_names, load_harness


@pytest.fixture(scope="module", params=harness_names())
def served(request: pytest.FixtureRequest) -> Iterator[BackendHarness]:
    """Each backend with its server, which all cases share."""
    harness = load_harness(request.param)
    harness.start()
    try:
        yield harness
    finally:
        harness.stop()


@pytest.fixture
def harness(served: BackendHarness, request: pytest.FixtureRequest) -> BackendHarness:
    """The backend, or a skip that names what it cannot do: `@pytest.mark.needs(Can.DATABASE)`."""
    for mark in request.node.iter_markers("needs"):
        for ability in mark.args:
            if ability not in served.can:
                pytest.skip(f"{served.name} cannot {Can(ability)}")
    return served


@pytest.fixture
async def bench(harness: BackendHarness) -> AsyncGenerator[Bench]:
    async with opened_bench(harness) as bench:
        yield bench
        await bench.close()
        assert await bench.running() == 0, "instances are left at the server"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): what a backend must be able to do")
