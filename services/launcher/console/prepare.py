"""Runs the `[[prepare]]` commands of a spec whose results are missing or out of date."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from services.common.config import Model, parse
from services.common.errors import ConfigError
from services.launcher.console.interrupts import Interrupts

_TAIL_CHARACTERS = 4_000


class PrepareError(Exception):
    """A command of the spec failed; the message has its last lines."""


class Prepare(Model):
    """One `[[prepare]]` table: run `command` when `creates` is missing, or older than a file that
    matches a pattern of `needs`."""

    creates: str
    command: tuple[str, ...]
    message: str = ""
    needs: tuple[str, ...] = ()

    def done(self) -> bool:
        return Path(self.creates).exists()

    def outdated(self) -> bool:
        made = Path(self.creates).stat().st_mtime
        used = (path for pattern in self.needs for path in Path().glob(pattern))
        return any(path.stat().st_mtime > made for path in used)


def parse_all(spec: dict[str, Any]) -> list[Prepare]:
    """The spec's prepare tables. Raises ConfigError."""
    tables = spec.get("prepare", [])
    if not isinstance(tables, list):
        raise ConfigError("prepare: write [[prepare]], with two brackets")
    found = [parse(Prepare, table, where=f"prepare.{i}") for i, table in enumerate(tables)]
    for number, prepare in enumerate(found):
        if not prepare.command:
            raise ConfigError(f"prepare.{number}.command: is empty")
    return found


async def run_all(
    spec: dict[str, Any], console: Console, interrupts: Interrupts, *, refresh: bool
) -> None:
    """Make what is missing and, with `refresh`, what is out of date. A run that goes on keeps what
    it began with. Raises PrepareError, InterruptedByUserError."""
    for prepare in parse_all(spec):
        if prepare.done() and not (refresh and prepare.outdated()):
            continue
        message = prepare.message or f"Making {prepare.creates}"
        if console.is_terminal:
            with console.status(message):
                await interrupts.unless(_run(prepare))
        else:
            console.print(message, soft_wrap=True)
            await interrupts.unless(_run(prepare))


async def _run(prepare: Prepare) -> None:
    # `python` is the one that runs this, wherever PATH leads.
    program, *rest = prepare.command
    program = sys.executable if program == "python" else program
    process = await asyncio.create_subprocess_exec(
        *(program, *rest),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    command = " ".join(prepare.command)
    if process.returncode != 0:
        tail = output.decode(errors="replace")[-_TAIL_CHARACTERS:]
        raise PrepareError(f"`{command}` exited with code {process.returncode}:\n{tail}")
    if not prepare.done():
        raise PrepareError(f"`{command}` did not create {prepare.creates}")
    # The command may have found nothing to do.
    os.utime(prepare.creates)
