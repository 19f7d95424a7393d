"""A real front door with a scripted trainer, its key in the environment."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.learner.hosted.hosted_runs import ShapedTrainer
from tests.support.tinker_front import KEY, serving_front
from tests.support.tinker_sessions import end_sessions
from tests.tinker.work.desk_doubles import ScriptedEngine


@dataclass(frozen=True, slots=True)
class HostedFront:
    url: str
    trainer: ShapedTrainer


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    # Its end waits for a service that is down.
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    end_sessions()


@pytest.fixture
async def front(tmp_path: Path) -> AsyncGenerator[HostedFront]:
    trainer = ShapedTrainer()
    async with serving_front(tmp_path / "server", trainer, ScriptedEngine()) as url:
        yield HostedFront(url, trainer)
