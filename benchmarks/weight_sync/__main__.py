"""Cost of new weights on each way into an engine: `python -m benchmarks.weight_sync`.

Publishes a random Qwen3 in bfloat16 as ranks do and brings it to a worker by the services' own
code, each part compared with its minimal work. The last line is one JSON object:

- `shared_memory`: CPU of both sides, up to the last checked byte in a worker's file, over that of
  one plain copy into a new file there and one checksum; `publish` and `load` are the single sides.
- `gloo`: the sender's process and a checking receiver, over two bare processes that broadcast the
  same buckets by torch.distributed: CPU of both processes, the receiver's wall time.
- `grpc`: CPU seconds per GB of WeightService's process and of the worker that fetches and checks.
- `delta`: bytes per parameter that a worker with the previous publication fetches, after each of
  several AdamW steps at a learning rate of 1e-6 on float32 masters, published in bfloat16: after
  the first step, in which AdamW moves every parameter by the rate itself, and the most of the
  others. CPU seconds per GB of the publication: of the server, which computes the difference, and
  the worker.
- `live_update`: seconds per GB of whole updates of real vLLM on CPU: `vllm` is its own part,
  loading from a mapped file; the rest is staging (`shared_memory`) or receiving (`gloo`).

All medians. About two minutes.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.weight_sync.byte_paths import compare_shared_memory, measure_grpc
from benchmarks.weight_sync.gloo_paths import compare_gloo
from benchmarks.weight_sync.live_engine import measure_live_updates
from benchmarks.weight_sync.publication import PublishedModel
from benchmarks.weight_sync.trained_deltas import measure_deltas
from flotilla_common.telemetry import log

PARTS = ("shared_memory", "gloo", "grpc", "delta", "live_update")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of the model, 31 MB each")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    log.setup("benchmark", "", level="ERROR")
    torch.set_num_threads(1)
    print(json.dumps(asyncio.run(measure_parts(given.layers, given.pairs, given.parts))))


async def measure_parts(layers: int, pairs: int, parts: list[str]) -> dict[str, Any]:
    async with publishing(layers) as (published, folder):
        measures: dict[str, Any] = {
            "shared_memory": compare_shared_memory,
            "gloo": compare_gloo,
            "grpc": measure_grpc,
            "delta": measure_deltas,
            "live_update": measure_live_updates,
        }
        found = {part: await measures[part](published, folder, pairs) for part in parts}
    return {**found, "megabytes": published.total_bytes // 10**6, "load": os.getloadavg()[0]}


@asynccontextmanager
async def publishing(layers: int) -> AsyncGenerator[tuple[PublishedModel, Path]]:
    """Make a model published in shared memory, and a folder there for a worker."""
    with TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        published = PublishedModel(folder, layers)
        try:
            yield published, folder
        finally:
            published.slots.unlink_slots()


if __name__ == "__main__":
    main()
