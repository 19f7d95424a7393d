"""Processes that tests start, and that print a line once they are ready."""

import asyncio
import json
import select
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import LIMIT_S

_END_S = 60.0
Words = Sequence[str | Path]


def start_process(
    command: Words, *, limit_s: float = LIMIT_S, **options: Any
) -> tuple[subprocess.Popen[str], str]:
    """Start a process; return it, and the first line that it prints.

    Its standard input is a pipe, with which some servers end."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options)
    assert process.stdout is not None
    ready = select.select([process.stdout], [], [], limit_s)[0]
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        raise AssertionError(f"{command}: no line within {limit_s:g} s, code {process.wait()}")
    return process, line


def end_process(process: subprocess.Popen[str]) -> str | None:
    """End a process with SIGTERM; return what it wrote to standard error, if that is a pipe."""
    process.terminate()
    try:
        return process.communicate(timeout=_END_S)[1]
    finally:
        process.kill()


@contextmanager
def started(command: Words, **options: Any) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process, and the first line that it prints; it ends with the block."""
    process, line = start_process(command, **options)
    try:
        yield process, line
    finally:
        end_process(process)


@contextmanager
def serving_process(command: Words, **options: Any) -> Generator[str]:
    """The URL of a server that prints {"url": ...} once it serves; it ends with the block."""
    with started(command, **options) as (_, line):
        yield json.loads(line)["url"]


async def start_beside(
    command: Words, *, limit_s: float = LIMIT_S, **options: Any
) -> tuple[asyncio.subprocess.Process, str]:
    """Start a process beside the tasks of a loop; return it, and the first line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, **options
    )
    assert process.stdout is not None
    async with asyncio.timeout(limit_s):
        line = (await process.stdout.readline()).decode()
    assert line, f"{command} has ended with code {await process.wait()}"
    return process, line
