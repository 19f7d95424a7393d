"""The real front door of `flotilla tinker-serve` in the test's own process, with scripted peers."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from flotilla_tinker import wire
from flotilla_tinker.api.adapters.http_server import ServerSettings, serving_http
from flotilla_tinker.api.calls import Front
from flotilla_tinker.api.keys import ClientKeys
from flotilla_tinker.api.known_facts import KnownFacts
from flotilla_tinker.ports import SamplingPeer, TrainingPeer
from flotilla_tinker.work.desk import open_desk

KEY = "tml-0123456789abcdef"
_POLL_S = 20.0


@asynccontextmanager
async def serving_front(
    folder: Path, training: TrainingPeer, sampling: SamplingPeer
) -> AsyncGenerator[str]:
    """Serve clients with KEY during the block; yield the URL. The journal is in the folder, so that
    the next block there is the server restarted."""
    async with open_desk(folder, training, sampling, wire) as desk:
        front = Front(desk, KnownFacts(desk), poll_s=_POLL_S)
        settings = ServerSettings("127.0.0.1", 0, 2**24)
        async with serving_http(front, ClientKeys({"tests": KEY}), settings) as address:
            yield f"http://{address}"
