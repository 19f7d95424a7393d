"""A launcher in a process of its own, from when it listens."""

import asyncio
import os
from pathlib import Path

import pytest

from flotilla_launcher.cli.launcher_client import LAUNCHER_LOG
from flotilla_launcher.security.launcher_address import LauncherAddress, read_address
from tests.support.launcher import forged_command, forged_fakes
from tests.support.repository import ROOT

# A machine that starts many processes at once takes long.
START_S = 60.0


async def start_launcher(runs: Path, **environ: str) -> asyncio.subprocess.Process:
    """Start a launcher, and wait until it listens. It and its fakes are forks of a forge; it writes
    to the log that commands give it."""
    log = runs / LAUNCHER_LOG
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *forged_command("-m", "flotilla_launcher", "--runs", str(runs)),
            cwd=ROOT,
            env={**os.environ, **forged_fakes(), **environ},
            stdout=output,
            stderr=output,
        )
    await address_of(runs, process, log)
    return process


async def address_of(
    runs: Path, process: asyncio.subprocess.Process, stderr: Path | None = None
) -> LauncherAddress:
    """Return where the launcher of `runs` listens, as soon as it does.

    The test fails with what is in `stderr`, a pipe without it, once the process has ended; and
    after START_S."""
    async with asyncio.timeout(START_S):
        while (found := read_address(runs)) is None:
            if process.returncode is not None:
                printed = await _read_output(process, stderr)
                pytest.fail(f"the launcher ended with code {process.returncode}: {printed}")
            await asyncio.sleep(0.05)
    return found


async def _read_output(process: asyncio.subprocess.Process, stderr: Path | None) -> str:
    if stderr is not None:
        return await asyncio.to_thread(stderr.read_text)
    _, printed = await process.communicate()
    return printed.decode()
