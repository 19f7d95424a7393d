"""Bytes that a worker with the previous publication fetches of the next, over training steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.weight_sync.byte_paths import TOKEN, CountingFeed, connected
from benchmarks.weight_sync.publication import (
    Clock,
    PublishedModel,
    announced,
    cpu_of,
    per_gb,
    policy_of,
    random_model,
    write_version,
)
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import Publication as Written
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_server import WeightServerConfig
from flotilla_rollout.work.weight_staging import KeptWeights, stage_weights

# Tokens of a step. In a random model, their gradients reach all parameters.
SEQUENCES, LENGTH = 2, 64
LEARNING_RATE = 1e-6


class TrainedModel:
    """Model trained on random tokens by a rank's optimizer; its float32 masters are published in
    bfloat16."""

    def __init__(self, folder: Path, layers: int) -> None:
        self._model = random_model(layers)
        parameters = dict(self._model.named_parameters())
        self.size = sum(parameter.numel() for parameter in parameters.values())
        self._optimizer = Optimizer(parameters, OptimizerConfig(lr=LEARNING_RATE))
        self.slots = WeightSlots(parameters, torch.bfloat16, folder, "trained")

    def write_versions(self, steps: int) -> Iterator[Written]:
        """Publish the model now and after each of `steps` steps."""
        yield write_version(self.slots, 0)
        for step in range(1, steps + 1):
            tokens = torch.randint(self._model.config.vocab_size, (SEQUENCES, LENGTH))
            self._model(tokens, labels=tokens).loss.backward()
            self._optimizer.step(LEARNING_RATE)
            yield write_version(self.slots, step)


async def measure_deltas(published: PublishedModel, folder: Path, pairs: int) -> dict[str, Any]:
    """Return the bytes fetched after each step, and the cost."""
    trained = TrainedModel(folder, published.layers)
    server = PublicationChild("flotilla_learner.weights.weight_server", folder / "server.log")
    per_parameter: list[float] = []
    cpu: dict[str, list[float]] = {"sender": [], "receiver": []}
    try:
        address = await server.start_process(WeightServerConfig("run", TOKEN))
        [process] = psutil.Process().children()
        async with connected(address) as feed:
            kept = KeptWeights(folder / "kept")
            for written in trained.write_versions(pairs):
                await server.serve_publication(written, policy_of(written))
                before, clock = cpu_of([process]), Clock()
                fetched = await fetch_next(written, address, feed, kept)
                cpu["receiver"].append(clock.cpu_s)
                cpu["sender"].append(cpu_of([process]) - before)
                per_parameter.append(round(fetched / trained.size, 4))
            kept.forget()
    finally:
        await server.close()
        trained.slots.unlink_slots()
    first, *others = per_parameter[1:]
    figures = {"bytes_per_parameter": max(others), "bytes_per_parameter_first_step": first}
    sizes = {
        f"{side}_cpu_s_per_gb": per_gb(each[1:], trained.slots.total_bytes)
        for side, each in cpu.items()
    }
    return {**figures, "whole": per_parameter[0], **sizes}


async def fetch_next(written: Written, address: str, feed: CountingFeed, kept: KeptWeights) -> int:
    """Fetch a publication like a worker that keeps the previous one; return the fetched bytes."""
    staged, before = kept.path.with_name("staged"), feed.fetched_bytes
    update = replace(announced(written, "grpc", address), keep=True)
    await stage_weights(update, feed, staged, kept)
    kept.replace_by(update, staged)
    return feed.fetched_bytes - before
