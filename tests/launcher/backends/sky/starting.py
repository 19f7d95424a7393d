"""Launches of replicas on the SkyPilot of the tests."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from flotilla_launcher.backends.ports import BackendUnreachable, LaunchSpec
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, ReplicaKey, Unit
from tests.support import sky_launches

T = TypeVar("T")
KEYS: tuple[ReplicaKey, ...] = ((LEARNER, 0), (GATEWAY, 0), (ROLLOUT, 0))


def brief(key: ReplicaKey, patience_s: float = 30.0, **changes: Any) -> LaunchSpec:
    settings = sky_launches.config(commit="HEAD", provision={"timeout_s": patience_s})
    return sky_launches.launch(key, settings, **changes)


async def start_all(backend: SkyBackend) -> list[Unit]:
    return list(await asyncio.gather(*(backend.start_replica(brief(key)) for key in KEYS)))


async def until_answered(request: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request while the backend cannot answer it, as the launcher does."""
    while True:
        with suppress(BackendUnreachable):
            return await request()
