"""A start of vLLM that is given up leaves none of its processes."""

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters import vllm, vllm_process
from flotilla_rollout.adapters.engine_group import EngineGroup
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from tests.support.waiting import until


def _model_that_never_loads(options: dict[str, Any]) -> None:
    """Start a process, like vLLM, and wait for it in a thread that cannot be cancelled."""
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300.0,))
    engine.start()
    engine.join()


async def test_a_start_that_is_cancelled_ends_the_engines_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("refuse_foreign_torchvision", "set_environment", "engine_options"):
        monkeypatch.setattr(vllm_process, name, lambda *given, **named: {})
    monkeypatch.setattr(vllm_process, "_create_llm", _model_that_never_loads)
    model: Any = type("Model", (), {"folder": tmp_path})()
    starting = asyncio.create_task(vllm.VllmEngine.start_engine(EngineConfig(device="cpu"), model))
    await until(multiprocessing.active_children)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not multiprocessing.active_children(), 20.0)


class _StartedEngine:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[_StartedEngine]:
    """Engines that have been started; the third start fails."""
    engines: list[_StartedEngine] = []

    async def start_engine(config: EngineConfig, model: Any, index: int = 0) -> _StartedEngine:
        assert index == len(engines)
        if index == 2:
            raise RuntimeError("no memory")
        engines.append(_StartedEngine())
        return engines[-1]

    monkeypatch.setattr(vllm.VllmEngine, "start_engine", start_engine)
    return engines


MODEL = ServedModel(Path("m"), PolicyConfig(model="m", max_model_len=8), ())


async def test_engines_that_have_started_are_closed_when_another_does_not(
    started: list[_StartedEngine],
) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        await start_engines(EngineConfig(data_parallel=3), MODEL)
    assert [engine.closed for engine in started] == [True, True]


async def test_one_engine_stands_alone_and_two_are_a_group(started: list[_StartedEngine]) -> None:
    assert await start_engines(EngineConfig(), MODEL) is started.pop()
    assert isinstance(await start_engines(EngineConfig(data_parallel=2), MODEL), EngineGroup)
    assert len(started) == 2


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("stages", "warned"), [(1, False), (2, True)])
async def test_a_pipeline_is_logged_as_untried(stages: int, warned: bool) -> None:
    options = {"pipeline_parallel_size": stages}
    with capture_logs() as logs:
        await start_engines(EngineConfig(options=options), MODEL)
    assert any("pipeline parallel" in line["event"] for line in logs) is warned
