"""Whole updates of real vLLM on CPU, and vLLM's own part of them."""

import statistics
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.weight_sync.byte_paths import connected
from benchmarks.weight_sync.publication import (
    Clock,
    PublishedModel,
    announced,
    cpu_of,
    policy_of,
)
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.sender_config import WeightSenderConfig
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine
from flotilla_rollout.work.weight_staging import stage_weights

SENDER = "flotilla_learner.weights.adapters.weight_sender"


class UpdateFigures:
    """Wall and CPU seconds of updates. CPU counts the worker and all processes of its engine."""

    def __init__(self) -> None:
        self._wall: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}
        self._processes = psutil.Process().children(recursive=True)

    async def note(self, name: str, action: Any) -> None:
        before, clock = cpu_of(self._processes), Clock()
        await action
        self._wall.setdefault(name, []).append(clock.wall_s)
        self._cpu.setdefault(name, []).append(clock.cpu_s + cpu_of(self._processes) - before)

    def summarise(self, total_bytes: int) -> dict[str, Any]:
        """Return seconds per GB and shares, without the first update."""
        wall = {name: statistics.median(values[1:]) for name, values in self._wall.items()}
        cpu = {name: statistics.median(values[1:]) for name, values in self._cpu.items()}

        def shape(found: dict[str, float]) -> dict[str, Any]:
            scaled = {name: round(value / total_bytes * 1e9, 3) for name, value in found.items()}
            shared = scaled["stage"] + scaled["vllm"]
            return {
                "shared_memory": {
                    "whole": round(shared, 3),
                    "vllm": scaled["vllm"],
                    "vllm_share": round(scaled["vllm"] / shared, 2),
                },
                "gloo": {
                    "whole": scaled["gloo"],
                    "vllm": scaled["vllm"],
                    "vllm_share": round(scaled["vllm"] / scaled["gloo"], 2),
                },
            }

        return {"wall_s_per_gb": shape(wall), "cpu_s_per_gb": shape(cpu)}


async def measure_live_updates(
    published: PublishedModel, folder: Path, pairs: int
) -> dict[str, Any]:
    """Return the cost of whole updates by shared memory and over gloo, after one warm-up each."""
    sender = PublicationChild(SENDER, folder / "sender.log")
    try:
        address = await sender.start_process(WeightSenderConfig("run"))
        async with serving(published.model_folder) as engine, connected(None) as feed:
            figures = UpdateFigures()
            for _ in range(pairs + 1):
                written, staged = published.write_next(), folder / "staged"
                update = announced(written, "shm", str(written.path))
                await figures.note("stage", stage_weights(update, feed, staged))
                await figures.note("vllm", engine.load_weights(update, staged))
                staged.unlink()
                written = published.write_next()
                await sender.serve_publication(written, policy_of(written))
                sent = announced(written, "gloo", address)
                await figures.note("gloo", engine.receive_weights(sent))
            return figures.summarise(published.total_bytes)
    finally:
        await sender.close()


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Engine]:
    shared = PolicyConfig(model=str(folder), dtype="bfloat16", max_model_len=512)
    config = EngineConfig(device="cpu", max_num_seqs=4)
    engine = await start_engines(config, ServedModel(folder, shared, [2]))
    try:
        yield engine
    finally:
        await engine.close()
