"""The learner's ranks in a process of their own: `... MODEL FOLDER HOST RAY_PORT`.

Trains a step with a further machine and prints `trained FINGERPRINT`; reads a line, then tries
another step, and prints `lost SECONDS` when that fails.
"""

import asyncio
import sys
import time
from pathlib import Path

from flotilla_learner.ports import RankError
from tests.learner.ranks.nodes import Head, config_of, head
from tests.support.tiny_ranks import make_batch


async def main(model: Path, folder: Path, host: str, port: int) -> None:
    async with head(folder, model, config_of(2, rank={"ray_port": port}), host) as learner:
        await learner.ranks.start_ranks(None)
        await learner.ranks.train_step(make_batch(step=1))
        print("trained", (await learner.ranks.publish_weights(1)).fingerprint.hex(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await lose(learner)


async def lose(learner: Head) -> None:
    started = time.monotonic()
    try:
        await learner.ranks.train_step(make_batch(step=2))
    except RankError as error:
        print("lost", time.monotonic() - started, str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
