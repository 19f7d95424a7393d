"""End of a child process that drains when it is asked to."""

import asyncio
from asyncio.subprocess import Process


async def end_process(process: Process, seconds: float) -> None:
    """End a process by SIGTERM, or kill it if it has not ended after so many seconds."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
