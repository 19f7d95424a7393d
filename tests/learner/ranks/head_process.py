"""The learner's ranks in a process of their own: `... MODEL FOLDER HOST TLS_DIR`.

Says `serving ADDRESS`; trains a step with a further machine and says `trained FINGERPRINT`; for
each line that it then reads tries another, and says `lost SECONDS` when that fails.
"""

import asyncio
import sys
import time
from pathlib import Path

from services.common.tls import read_tls
from services.learner.ports import RankError
from tests.learner.ranks.nodes import Head, config_of, head
from tests.support.tiny_ranks import make_batch


async def main(model: Path, folder: Path, host: str, tls: Path) -> None:
    async with head(folder, model, config_of(2), host, read_tls(tls)) as learner:
        print("serving", learner.address, flush=True)
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
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
