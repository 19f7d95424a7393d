"""Brings a run of machines into each of its phases."""

import asyncio
from collections.abc import Awaitable, Callable

from flotilla_launcher.state import RunState
from tests.faults.sky_kills.folder import SkyFolder


async def preflight(folder: SkyFolder) -> None:
    folder.hold.touch()
    await folder.begin()
    await folder.reached(RunState.PREFLIGHT)


async def submitting(folder: SkyFolder) -> None:
    """SkyPilot has received the request, and lists nothing for it yet."""
    folder.script(accept_s=1.0)
    await folder.begin()
    query = "SELECT COUNT(*) FROM operations WHERE state = 'sent'"
    await folder.until(lambda: folder.ledger(query) == [(3,)])
    await asyncio.sleep(0.5)
    assert folder.machines() == []


async def without_capacity(folder: SkyFolder) -> None:
    folder.script(sold_out=1)
    await folder.begin()
    await folder.until(lambda: folder.machine_requests("learner") > 0)


async def booting(folder: SkyFolder) -> None:
    """A machine boots, and none has registered."""
    folder.script(boot_s=1.5)
    await folder.begin()
    await folder.until(lambda: len(folder.machines()) == 3)


async def setting_up(folder: SkyFolder) -> None:
    """A machine is there, and not yet what it is for."""
    folder.script(setup_s=1.5)
    await folder.begin()
    await folder.until(lambda: folder.sets_up("learner"))


async def starting(folder: SkyFolder) -> None:
    """All machines are there, and none serves."""
    await folder.begin()
    await folder.reached(RunState.STARTING)


async def training(folder: SkyFolder) -> None:
    await folder.begin()
    folder.serve()
    await folder.reached(RunState.RUNNING)


async def draining(folder: SkyFolder) -> None:
    """Replicas have the command to end, and none does."""
    await training(folder)
    folder.obedient = False
    folder.begin_to_stop(grace_s=5.0)
    await folder.reached(RunState.DRAINING)


async def tearing_down(folder: SkyFolder) -> None:
    """All replicas have ended; a cluster that SkyPilot's server has lost takes its time."""
    await training(folder)
    folder.script(down_s=1.5)
    folder.post("leak", cluster=f"{folder.name('learner')}-99")
    folder.begin_to_stop(grace_s=5.0)
    await folder.reached(RunState.TEARDOWN)


Phase = Callable[[SkyFolder], Awaitable[None]]
