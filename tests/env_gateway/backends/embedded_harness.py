"""The environments of this repository in the gateway's worker processes."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from flotilla_env_gateway.adapters.embedded.backend import EmbeddedBackend
from flotilla_env_gateway.ports import Backend
from tests.env_gateway.backends.apps import BookingTasks, stopped
from tests.env_gateway.backends.harness import Can


class EmbeddedHarness(BookingTasks):
    name = "embedded"
    can = frozenset(Can)

    def start(self) -> None:
        """Every backend starts workers of its own."""

    def stop(self) -> None:
        """They end with it."""

    def settings(self) -> Mapping[str, Any]:
        return {"backend": "embedded", "backends": {"embedded": {"workers": 2}}}

    async def running(self, backend: Backend) -> int:
        workers = _pool(backend).workers
        requests = (worker.send_request({"op": "instances"}, timeout_s=5.0) for worker in workers)
        return sum(len(answer["instances"]) for answer in await asyncio.gather(*requests))

    async def kill(self, backend: Backend, instance_id: str) -> None:
        for worker in _pool(backend).workers:
            answer = await worker.send_request({"op": "instances"}, timeout_s=5.0)
            if instance_id in answer["instances"]:
                os.kill(worker.pid, signal.SIGKILL)
                return
        raise LookupError(instance_id)

    def frozen(self, backend: Backend) -> AbstractContextManager[None]:
        return stopped([worker.pid for worker in _pool(backend).workers])


def _pool(backend: Backend) -> Any:
    assert isinstance(backend, EmbeddedBackend)
    return backend.pool


harness = EmbeddedHarness
