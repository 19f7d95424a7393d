"""A start of vLLM that is given up leaves none of its processes."""

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from services.rollout.adapters import vllm
from services.rollout.config.rollout import EngineConfig


def _model_that_never_loads(options: dict[str, Any]) -> None:
    """What vLLM does: start a process, and wait for it in a thread that cannot be cancelled."""
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300.0,))
    engine.start()
    engine.join()


async def test_a_start_that_is_cancelled_ends_the_engines_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("refuse_foreign_torchvision", "set_environment", "engine_options"):
        monkeypatch.setattr(vllm, name, lambda *given, **named: {})
    monkeypatch.setattr(vllm, "_create_llm", _model_that_never_loads)
    model: Any = type("Model", (), {"folder": tmp_path})()
    starting = asyncio.create_task(vllm.VllmEngine.start_engine(EngineConfig(device="cpu"), model))
    while not multiprocessing.active_children():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(20):
        while multiprocessing.active_children():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
