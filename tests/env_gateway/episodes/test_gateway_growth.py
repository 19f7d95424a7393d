"""Remains of ended episodes in a gateway: none grows with their number."""

import asyncio
import gc
import json
from collections.abc import Iterator

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from tests.env_gateway.backends.embedded_harness import EmbeddedHarness
from tests.env_gateway.backends.fleet_harness import FleetHarness
from tests.env_gateway.backends.harness import BackendHarness
from tests.env_gateway.backends.mcp_harness import McpHarness
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway
from tests.support.waiting import until

BACKENDS = {"embedded": EmbeddedHarness, "mcp": McpHarness, "fleet": FleetHarness}
AT_ONCE = 16


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def harness(request: pytest.FixtureRequest) -> Iterator[BackendHarness]:
    harness = BACKENDS[request.param]()
    harness.start()
    yield harness
    harness.stop()


async def run_episodes(gateway: Gateway, harness: BackendHarness, numbers: range) -> None:
    """Open, call and close; every tenth is graded, which is what takes time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def episode(number: int) -> None:
        async with places:
            text = json.dumps(harness.task(number % 5))
            session = await opened(gateway, open_spec(number, task=text, group_id=f"g{number}"))
            name, arguments = harness.read_call
            answer, _ = await gateway.call_tool(session, 0, name, json.dumps(arguments), 20.0)
            assert answer.outcome in (ToolOutcome.OK, ToolOutcome.TOOL_ERROR), answer
            if number % 10 == 0:
                assert (await gateway.grade_episode(session, "", None, 20.0)).reward == 0.0
            gateway.close(session.episode.episode_id)

    await asyncio.gather(*(episode(number) for number in numbers))
    await until(lambda: not gateway.closer.pending)


def kept() -> dict[str, int]:
    """Return the number of objects of the gateway's classes and of asyncio."""
    gc.collect()
    counts: dict[str, int] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if str(kind.__module__).startswith("flotilla_env_gateway") or kind.__name__ == "Task":
            counts[kind.__qualname__] = counts.get(kind.__qualname__, 0) + 1
    return counts


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


async def grown(harness: BackendHarness, first: int, episodes: int) -> tuple[dict[str, int], int]:
    """Return the objects and bytes that grow between some and many episodes."""
    config = EnvGatewayConfig.model_validate({"open_timeout_s": 60.0, **harness.settings()})
    backend = build_backend(config.backend, config)
    try:
        async with grading_gateway({config.backend: backend}, config) as gateway:
            await run_episodes(gateway, harness, range(first))
            before, bytes_before = kept(), rss_bytes()
            await run_episodes(gateway, harness, range(first, first + episodes))
            after = kept()
            more = {name: n - before.get(name, 0) for name, n in after.items()}
            assert (len(gateway.book), gateway.admission.held_places) == (0, 0)
            return {n: c for n, c in more.items() if c > 5}, rss_bytes() - bytes_before
    finally:
        await backend.close()


async def test_nothing_is_kept_of_episodes_that_are_over(harness: BackendHarness) -> None:
    objects, _ = await grown(harness, 12, 12)
    assert objects == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_memory_does_not_grow_with_the_number_of_episodes(harness: BackendHarness) -> None:
    objects, more_bytes = await grown(harness, 200, 2000)
    assert objects == {}
    # Request and episode ids of those that are over are remembered, a bounded number of them.
    assert more_bytes < 24 * 2**20, f"{more_bytes / 2**20:.1f} MiB"
