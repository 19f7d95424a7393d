"""A rollout's engine in a process of its own: `... MODEL FOLDER HOST RAY_PORT`.

Serves weights on two machines and prints `serves ERROR`, the distance of its canary from the model.
After it has read a line, it waits until a machine is lost and prints `lost SECONDS REASON`.
"""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np

from tests.rollout.nodes.machines import Head, config_of, head
from tests.support.tiny_model import load_model, publish, reference_logprobs


async def main(model: Path, folder: Path, host: str, port: int) -> None:
    async with head(folder, model, config_of(ray_port=port), host) as rollout:
        print("serves", await canary_error(rollout), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        assert rollout.engine is not None
        started = time.monotonic()
        reason = await rollout.engine.wait_until_dead()
        print("lost", time.monotonic() - started, " ".join(reason.split()), flush=True)


async def canary_error(rollout: Head) -> float:
    """Start the engine and load weights; return how far its canary is from the model."""
    engine = await rollout.start()
    model = load_model(rollout.served.folder)
    update = publish(model, rollout.folder / "first", 1)
    await engine.load_weights(update, Path(update.location))
    canary = await engine.compute_logprobs(update.canary_token_ids)
    expected = reference_logprobs(model, update.canary_token_ids)
    return float(np.abs(canary - expected).max())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
