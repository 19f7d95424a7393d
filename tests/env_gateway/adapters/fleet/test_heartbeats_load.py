"""Two thousand instances at the emulator, kept alive over HTTP while it is slow and fails."""

import asyncio
import json

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.fleet import backend as fleet
from flotilla_env_gateway.config.backends import FleetConfig
from flotilla_env_gateway.ports import ProvisionRequest
from tests.env_gateway.backends.apps import BookingTasks
from tests.env_gateway.backends.fleet_harness import Emulator

INSTANCES = 2000
LATENCY_S, MINUTES = 3.0, 10.0


async def create(backend: fleet.FleetBackend, count: int) -> None:
    task = parse_task(json.dumps(BookingTasks().task(0)))
    places = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with places:
            request = ProvisionRequest(f"run.gw-{number}", task, ttl_s=7200.0)
            await backend.provision_instance(request, timeout_s=60.0)

    await asyncio.gather(*(one(number) for number in range(count)))


async def keep(emulator: Emulator, backend: fleet.FleetBackend) -> None:
    await create(backend, INSTANCES)
    await emulator.faults(faults=[{"on": ["heartbeat"], "delay": LATENCY_S, "rate": 0.01}])
    await asyncio.sleep(60.0 * MINUTES)
    count = await emulator.count()
    assert (len(count["instances"]["live"]), backend.lateness.late) == (INSTANCES, 0)
    # A beat every twenty seconds; one in a hundred fails.
    assert count["injected"]["heartbeat 502"] >= INSTANCES * MINUTES * 3 / 200


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_no_instance_of_two_thousand_ends_at_a_slow_control_plane() -> None:
    emulator = Emulator()
    emulator.start()
    try:
        config = FleetConfig(**emulator.config(heartbeat_interval_s=60))
        backend = fleet.build_fleet_backend(config, max_calls=64)
        try:
            await keep(emulator, backend)
        finally:
            await backend.close()
    finally:
        emulator.stop()
