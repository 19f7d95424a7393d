"""The `[[prepare]]` commands of a spec. They run where their results are missing: by
`flotilla train` before it requests a run, and by the launcher before a run of its own."""

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
from services.common.config import ConfigModel, parse_config
from services.common.errors import ConfigError
from services.common.redaction import redact
from services.launcher.backends.local.marked_processes import MARK_VARIABLE
from services.launcher.ports import PendingRun, RunRefusedError
from services.launcher.security.env_filter import variables_of_any_service

# The part of a run that prepares, in the mark of its processes and as the name of its log.
PREPARE_NAME = "prepare"
# Fetching and generating may take long; what takes longer is stuck.
LIMIT_S = 3600.0
_TAIL_CHARACTERS = 4_000
_BLOCK = 64 * 1024
_POLL_S = 0.2
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


class PrepareError(Exception):
    """A command of the spec failed; the message has its last lines."""


class PrepareCommand(ConfigModel):
    """One `[[prepare]]` table: run `command` if `creates` is missing, or older than a file
    that matches a pattern of `needs`."""

    creates: str
    command: tuple[str, ...]
    message: str = ""
    needs: tuple[str, ...] = ()

    def is_done(self) -> bool:
        return Path(self.creates).exists()

    def is_outdated(self) -> bool:
        """True when a needed file is newer. Raises PrepareError for a pattern without a file."""
        made = Path(self.creates).stat().st_mtime
        used = [path for pattern in self.needs for path in self._find_needed(pattern)]
        return any(path.stat().st_mtime > made for path in used)

    def _find_needed(self, pattern: str) -> list[Path]:
        found = list(Path().glob(pattern))
        if not found:
            raise PrepareError(
                f"prepare: {self.creates} needs {pattern!r}, which matches no file below"
                f" {Path().absolute()}; correct the pattern, or leave it out"
            )
        return found


def parse_prepare_tables(spec: Mapping[str, Any]) -> list[PrepareCommand]:
    """Parse the spec's prepare tables. Raises ConfigError."""
    tables = spec.get("prepare", [])
    if not isinstance(tables, list):
        raise ConfigError("prepare: write [[prepare]], with two brackets")
    found = [
        parse_config(PrepareCommand, table, where="spec", section=f"prepare.{i}")
        for i, table in enumerate(tables)
    ]
    for number, prepare in enumerate(found):
        if not prepare.command:
            raise ConfigError(f"prepare.{number}.command: is empty")
    return found


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """Options of a command: where its output goes, how it is marked, which variables it
    inherits besides those that any process of ours does, and how long it may take."""

    write: Callable[[str], object] = lambda text: None
    mark: str | None = None
    inherits: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    limit_s: float | None = None


async def execute_command(prepare: PrepareCommand, options: CommandOptions) -> None:
    """Run the command. Raises PrepareError. If cancelled, end all processes of the command."""
    # `python` is the one that runs this, wherever PATH leads.
    program, *rest = prepare.command
    program = sys.executable if program == "python" else program
    shown = redact(" ".join(prepare.command))
    mark = {MARK_VARIABLE: options.mark} if options.mark else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *(program, *rest),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**child_environment(*options.inherits, ours=True), **mark},
            pass_fds=options.descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise PrepareError(f"`{shown}` cannot be run: {error}") from error
    try:
        async with asyncio.timeout(options.limit_s):
            tail = await _forward_output(process, options.write)
            code = await process.wait()
    except TimeoutError as error:
        raise PrepareError(f"`{shown}` took longer than {options.limit_s:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code != 0:
        raise PrepareError(
            f"`{shown}` exited with code {code}:\n{tail}{_missing_module_hint(prepare, tail)}"
        )
    if not prepare.is_done():
        raise PrepareError(f"`{shown}` did not create {prepare.creates}")
    # The command may have found nothing to do.
    os.utime(prepare.creates)


async def _forward_output(
    process: asyncio.subprocess.Process, write: Callable[[str], object]
) -> str:
    """Forward the output of a process until it has ended, without secrets; return its last
    lines."""
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


def _missing_module_hint(prepare: PrepareCommand, said: str) -> str:
    """Suggest what to do if the interpreter of this environment is not the services'
    interpreter."""
    lacking = _NO_MODULE.search(said)
    if lacking is None or prepare.command[0] != "python":
        return ""
    command = shlex.join((".venv/bin/python", *prepare.command[1:]))
    folder = shlex.quote(str(Path.cwd()))
    return (
        f"\n{sys.executable} has no {lacking[1]}: make {prepare.creates} beforehand, where this"
        f" launcher is, with .venv (`make setup`), which has it:\n  cd {folder} && {command}"
    )


async def prepare_run(intent: PendingRun, say: Callable[[str], None]) -> None:
    """Create what is missing of a run's `[[prepare]]`, in the launcher's working folder, and
    say what that is. The output goes to the run's `logs/prepare.log`. Outdated files stay:
    other runs may be using them. Raises RunRefusedError."""
    try:
        wanted = parse_prepare_tables(json.loads(intent.spec_json or "{}"))
        if all(prepare.is_done() for prepare in wanted):
            return
        async with _hold_prepare_lock(intent.run_dir.parent) as lock:
            for prepare in wanted:
                # Perhaps made by another run while this one waited for it.
                if not prepare.is_done():
                    say(f"preparing: {prepare.creates}")
                    await _execute_logged(prepare, intent, lock)
    except (ConfigError, PrepareError) as error:
        raise RunRefusedError(f"the run could not be prepared: {error}") from error


async def _execute_logged(prepare: PrepareCommand, intent: PendingRun, lock: int) -> None:
    log = intent.run_dir / "logs" / f"{PREPARE_NAME}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:

        def write_log(text: str) -> None:
            file.write(text)
            file.flush()

        write_log(f"$ {redact(shlex.join(prepare.command))}\n")
        # By its mark it is found and ended when the run has ended without it.
        mark = f"{intent.run_dir.parent.resolve()}:{intent.run.run_id}/{PREPARE_NAME}"
        inherits = variables_of_any_service(json.loads(intent.spec_json), intent.config)
        await execute_command(prepare, CommandOptions(write_log, mark, inherits, (lock,), LIMIT_S))


@asynccontextmanager
async def _hold_prepare_lock(runs: Path) -> AsyncGenerator[int]:
    """Hold the lock of preparation, one at a time: two runs may want the same file. The
    command inherits the lock, and so keeps it when its launcher dies and the next one comes."""
    deadline = time.monotonic() + LIMIT_S
    with (runs / f"{PREPARE_NAME}.lock").open("a") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise PrepareError(f"that of another run has not ended for {LIMIT_S:g} s")
            await asyncio.sleep(_POLL_S)
        yield file.fileno()


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
