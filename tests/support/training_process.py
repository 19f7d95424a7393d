"""A training service as a process of its own, and a client's connection to it."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla.learner.v1 import training_service_pb2_grpc
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc import rpc
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence
from tests.support.process_commands import command_of

TOKEN = "training-token-0123456789"
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
_SPEC = """
name = "trained"
[policy]
model = "{model}"
dtype = "float32"
max_model_len = 64
[learner.rank]
pack_tokens = 64
head_chunk = 16
[learner.training]
max_models = 3
max_rank = 8
"""


class TrainingProcess:
    """A service, called as its clients do it."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, stub: Any) -> None:
        self.process = process
        self.address = address
        self.stub = stub

    @property
    def rank_pids(self) -> list[int]:
        """Its ranks, the oldest first."""
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if "flotilla_learner.rank" in command_of(child)]
        return [child.pid for child in sorted(found, key=lambda child: child.create_time())]

    async def create(self, model: str, rank: int = 4, **settings: Any) -> pb.CreateModelResponse:
        parts = {"train_attention": True, "train_mlp": True, **settings}
        return await self.stub.CreateModel(
            pb.CreateModelRequest(model_id=model, lora_rank=rank, **parts)
        )

    async def accumulate(self, model: str, number: int, batch: TargetBatch) -> TargetScores:
        """Send a batch, two sequences in each message."""
        found: list[bytes] = []
        metrics: dict[str, float] = {}
        async for response in self.stub.ForwardBackward(encode_batch(model, number, batch)):
            found += response.logprobs
            metrics |= response.metrics
        shapes = [each.target_ids.shape for each in batch.sequences]
        values = [
            np.frombuffer(data, "<f4").reshape(shape)
            for data, shape in zip(found, shapes, strict=True)
        ]
        return TargetScores(values, metrics)

    async def update(self, model: str, number: int, **settings: float) -> float:
        operation = pb.Operation(model_id=model, number=number)
        request = pb.ApplyUpdateRequest(operation=operation, **{**ADAM, **settings})
        return (await self.stub.ApplyUpdate(request)).metrics["grad_norm"]

    async def save(self, model: str, number: int, folder: Path) -> int:
        operation = pb.Operation(model_id=model, number=number)
        request = pb.SaveStateRequest(operation=operation, folder=str(folder))
        return (await self.stub.SaveState(request)).total_bytes

    async def load(self, model: str, number: int, folder: Path, *, optimizer: bool = True) -> None:
        operation = pb.Operation(model_id=model, number=number)
        await self.stub.LoadState(
            pb.LoadStateRequest(operation=operation, folder=str(folder), with_optimizer=optimizer)
        )

    async def export(self, model: str, number: int, folder: Path) -> pb.ExportWeightsResponse:
        operation = pb.Operation(model_id=model, number=number)
        return await self.stub.ExportWeights(
            pb.ExportWeightsRequest(operation=operation, folder=str(folder))
        )


def encode_batch(
    model: str, number: int, batch: TargetBatch
) -> Iterator[pb.ForwardBackwardRequest]:
    """Yield the messages of a batch, two sequences in each."""
    encoded = [encode_sequence(each) for each in batch.sequences]
    head: dict[str, Any] = {
        "operation": pb.Operation(model_id=model, number=number),
        "loss": batch.loss,
        "loss_options": batch.options,
        "forward_only": batch.forward_only,
        "count": len(encoded),
    }
    for start in range(0, max(len(encoded), 1), 2):
        given = {} if start else head
        yield pb.ForwardBackwardRequest(**given, sequences=encoded[start : start + 2])


def encode_sequence(sequence: TargetSequence) -> pb.LossSequence:
    ids = sequence.target_ids
    return pb.LossSequence(
        token_ids=sequence.token_ids.astype("<i4").tobytes(),
        target_ids=ids.astype("<i8").tobytes(),
        targets=0 if ids.ndim == 1 else ids.shape[1],
        inputs={name: value.astype("<f4").tobytes() for name, value in sequence.inputs.items()},
    )


@asynccontextmanager
async def training_process(folder: Path, model: Path) -> AsyncGenerator[TrainingProcess]:
    """A service of this base; its files are in `folder`, and it ends with the block."""
    spec = folder / "spec.toml"
    await asyncio.to_thread(spec.write_text, _SPEC.format(model=model))
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "flotilla_learner.training", "--config", str(spec)),
        *("--run-id", "trained", "--run-dir", str(folder), "--listen", "127.0.0.1:0"),
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        address = await _address(process)
        async with rpc.channel(address, token=TOKEN, timeout_s=600) as channel:
            stub = training_service_pb2_grpc.TrainingServiceStub(channel)
            yield TrainingProcess(process, address, stub)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    while line := await process.stderr.readline():
        seen += line
        if b'"serving"' in line:
            return json.loads(line)["address"]
    raise AssertionError(seen.decode())
