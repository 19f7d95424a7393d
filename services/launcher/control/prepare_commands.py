"""The `[[prepare]]` commands of a spec: run where their results are missing, by `flotilla train`
before it asks for a run, and by the launcher before a run of its own."""

import asyncio
import fcntl
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from services.common.child_environment import child_environment
from services.common.config import Model, parse
from services.common.errors import ConfigError
from services.common.log import redact
from services.launcher.backends.local.backend import MARK
from services.launcher.ports import Intent, RefusedError
from services.launcher.security.env_filter import inherited_by_all

# The part of a run that prepares, in the mark of its processes and as the name of its log.
NAME = "prepare"
# Fetching and generating may take long; what takes longer is stuck.
LIMIT_S = 3600.0
_TAIL_CHARACTERS = 4_000
_BLOCK = 64 * 1024
_POLL_S = 0.2
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


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


def parse_all(spec: Mapping[str, Any]) -> list[Prepare]:
    """The spec's prepare tables. Raises ConfigError."""
    tables = spec.get("prepare", [])
    if not isinstance(tables, list):
        raise ConfigError("prepare: write [[prepare]], with two brackets")
    found = [
        parse(Prepare, table, where="spec", section=f"prepare.{i}")
        for i, table in enumerate(tables)
    ]
    for number, prepare in enumerate(found):
        if not prepare.command:
            raise ConfigError(f"prepare.{number}.command: is empty")
    return found


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Of a command: where its output goes, how it is marked, which variables it inherits besides
    what any process of ours does, and how long it may take."""

    write: Callable[[str], object] = lambda text: None
    mark: str | None = None
    inherits: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    limit_s: float | None = None


async def make(prepare: Prepare, around: Surroundings) -> None:
    """Run the command. Raises PrepareError; cancelled, it ends all that the command is."""
    # `python` is the one that runs this, wherever PATH leads.
    program, *rest = prepare.command
    program = sys.executable if program == "python" else program
    shown = redact(" ".join(prepare.command))
    mark = {MARK: around.mark} if around.mark else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *(program, *rest),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**child_environment(*around.inherits, ours=True), **mark},
            pass_fds=around.descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise PrepareError(f"`{shown}` cannot be run: {error}") from error
    try:
        async with asyncio.timeout(around.limit_s):
            tail = await _output(process, around.write)
            code = await process.wait()
    except TimeoutError as error:
        raise PrepareError(f"`{shown}` took longer than {around.limit_s:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code != 0:
        raise PrepareError(f"`{shown}` exited with code {code}:\n{tail}{_hint(prepare, tail)}")
    if not prepare.done():
        raise PrepareError(f"`{shown}` did not create {prepare.creates}")
    # The command may have found nothing to do.
    os.utime(prepare.creates)


async def _output(process: asyncio.subprocess.Process, write: Callable[[str], object]) -> str:
    """Hand on what a process says until it has ended, without secrets; returns its last lines."""
    assert process.stdout is not None
    rest, tail = b"", ""
    while True:
        block = await process.stdout.read(_BLOCK)
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if not block or len(rest) > _BLOCK:
            # An end without a newline, or a line without an end.
            lines, newline, rest = lines + newline + rest, b"", b""
        # Before the cut, which could leave half of a secret.
        text = redact((lines + newline).decode(errors="replace"))
        write(text)
        tail = (tail + text)[-_TAIL_CHARACTERS:]
        if not block:
            return tail


def _hint(prepare: Prepare, said: str) -> str:
    """What to do where the interpreter of this environment is not that of services."""
    lacking = _NO_MODULE.search(said)
    if lacking is None or prepare.command[0] != "python":
        return ""
    command = shlex.join((".venv/bin/python", *prepare.command[1:]))
    folder = shlex.quote(str(Path.cwd()))
    return (
        f"\n{sys.executable} has no {lacking[1]}: make {prepare.creates} beforehand, where this"
        f" launcher is, with .venv (`make setup`), which has it:\n  cd {folder} && {command}"
    )


async def prepare_run(intent: Intent, say: Callable[[str], None]) -> None:
    """Make what is missing of a run's `[[prepare]]`, in the launcher's working folder, and say what
    that is; the output is in the run's `logs/prepare.log`. What is out of date stays: other runs
    may be using it. Raises RefusedError."""
    try:
        wanted = parse_all(json.loads(intent.spec_json or "{}"))
        if all(prepare.done() for prepare in wanted):
            return
        async with _alone(intent.run_dir.parent) as lock:
            for prepare in wanted:
                # Perhaps made by another run while this one waited for it.
                if not prepare.done():
                    say(f"preparing: {prepare.creates}")
                    await _make_logged(prepare, intent, lock)
    except (ConfigError, PrepareError) as error:
        raise RefusedError(f"the run could not be prepared: {error}") from error


async def _make_logged(prepare: Prepare, intent: Intent, lock: int) -> None:
    log = intent.run_dir / "logs" / f"{NAME}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        write(f"$ {redact(shlex.join(prepare.command))}\n")
        # By its mark it is found and ended when the run has ended without it.
        mark = f"{intent.run_dir.parent.resolve()}:{intent.run.run_id}/{NAME}"
        inherits = inherited_by_all(json.loads(intent.spec_json), intent.config)
        await make(prepare, Surroundings(write, mark, inherits, (lock,), LIMIT_S))


@asynccontextmanager
async def _alone(runs: Path) -> AsyncGenerator[int]:
    """One preparation at a time: two runs may want the same file. The command inherits the lock,
    and so keeps it where its launcher dies and the next one comes."""
    deadline = time.monotonic() + LIMIT_S
    with (runs / f"{NAME}.lock").open("a") as file:
        while not _locked(file):
            if time.monotonic() > deadline:
                raise PrepareError(f"that of another run has not ended for {LIMIT_S:g} s")
            await asyncio.sleep(_POLL_S)
        yield file.fileno()


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
