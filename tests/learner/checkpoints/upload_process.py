"""A process that uploads a checkpoint to S3 and kills itself on the way, as `kill -9` would.

Run as a module: FOLDER ENDPOINT PREFIX CALL NAME. It dies as the store is to do CALL with a
name that contains NAME; `part` dies within a file, after its first part has gone.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from flotilla_learner.checkpoints.adapters import fsspec_store
from flotilla_learner.checkpoints.remote_upload import Uploader
from tests.support.remote_checkpoints import UploadingMachine, no_wait, s3_store, unreliable

# Three parts of the smallest size that S3 takes.
PART_BYTES = 5 << 20
LARGE_BYTES = 2 * PART_BYTES + 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(folder: Path, endpoint: str, prefix: str, moment: str, name: str) -> None:
    fsspec_store._PART_BYTES = PART_BYTES  # pyright: ignore[reportPrivateUsage]
    store = s3_store(endpoint, prefix)
    machine = UploadingMachine(folder, store)
    row = await machine.make(20, {"a.bin": b"a", "large.bin": bytes(LARGE_BYTES), "z.bin": b"z"})

    def fault(call: str, what: str) -> None:
        if call == moment and name in what:
            die()

    dying = unreliable(store, fault)
    if moment == "part":
        dying.upload = lambda path, target, sent: store.upload(
            path, target, lambda count: die() if name in target else sent(count)
        )
    Uploader(dying, machine.who, folder, keep=2, wait=no_wait).upload(machine.stage(row))


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(Path(given[0]), *given[1:]))
