"""Starts of replicas on an in-memory SkyPilot."""

import asyncio
from typing import Any

from services.launcher.backends.ports import LaunchSpec
from services.launcher.backends.sky.backend import SkyBackend
from services.launcher.state import GATEWAY, LEARNER, ReplicaKey, Unit
from tests.support import sky_launches

# The replicas that a group declares.
STATIC: tuple[ReplicaKey, ...] = ((LEARNER, 0), (GATEWAY, 0))


def brief(
    key: ReplicaKey, mode: str = "group", patience_s: float = 30.0, **changes: Any
) -> LaunchSpec:
    provision = {"timeout_s": patience_s}
    settings = sky_launches.config(mode=mode, commit="HEAD", provision=provision)
    return sky_launches.launch(key, settings, **changes)


async def group(backend: SkyBackend) -> list[Unit]:
    return list(await asyncio.gather(*(backend.start_replica(brief(key)) for key in STATIC)))
