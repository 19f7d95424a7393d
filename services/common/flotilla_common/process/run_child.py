"""A command that is given its whole input and run to its end."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Finished(NamedTuple):
    """Exit code of a command, negative for a signal, and what it wrote."""

    code: int
    output: bytes
    errors: bytes


async def run_child(
    command: Sequence[str],
    given: bytes = b"",
    *,
    env: Mapping[str, str],
    seconds: float | None = None,
    stderr: int = PIPE,
    folder: Path | None = None,
) -> Finished:
    """Run a command that reads `given`, with the environment `env`.

    Its process group is killed at the end, whatever the end is: a command may leave processes
    behind. Raises OSError if it cannot be started, TimeoutError after `seconds`."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=env,
            cwd=folder,
            start_new_session=True,
        )
    )
    try:
        # If its start were cancelled, asyncio would kill the command alone.
        process = await asyncio.shield(starting)
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(given)
    finally:
        process = await starting
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
    # There are none where `stderr` is not a pipe.
    return Finished(code, output, errors or b"")
