"""`[[prepare]]` commands of a spec, run if their results are missing: by `flotilla train`
before it requests a run, and by the launcher before it starts one."""

import asyncio
import fcntl
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

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.own_packages import folder_of
from flotilla_common.process.spec_commands import resolve_command
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_common.spec.old_names import explain_old_import
from flotilla_common.text.redaction import redact
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.ports import PendingRun, RunRefusedError
from flotilla_launcher.security.service_variables import variables_of_any_service

# Name of the preparing part of a run, in the mark of its processes and of its log.
PREPARE_NAME = "prepare"
# Downloads and generation may take long; a longer command is stuck.
LIMIT_S = 3600.0
_TAIL_CHARACTERS = 4_000
_BLOCK = 64 * 1024
_POLL_S = 0.2
_PACKAGE = "package:"
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


class PrepareError(Exception):
    """A prepare command failed; the message has its last lines."""


class PrepareCommand(ConfigModel):
    """One `[[prepare]]` table: run `command` if `creates` is missing or older than a file that
    matches a pattern of `needs`, or the code of `package:NAME` in it, wherever that is installed.
    It gets `variables` besides those of the run's services; `NAME_*` matches by prefix."""

    creates: str
    command: tuple[str, ...]
    message: str = ""
    needs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def is_done(self) -> bool:
        return Path(self.creates).exists()

    def is_outdated(self) -> bool:
        """Return whether a needed file is newer. Raises PrepareError if a pattern has no match."""
        made = Path(self.creates).stat().st_mtime
        used = [path for pattern in self.needs for path in self._find_needed(pattern)]
        # What is below a folder may change without it. A link to nothing has no time.
        used += [below for path in used if path.is_dir() for below in path.rglob("*")]
        return any(path.stat().st_mtime > made for path in used if path.exists())

    def _find_needed(self, pattern: str) -> list[Path]:
        if pattern.startswith(_PACKAGE):
            # One that is not installed here has not made anything here.
            folder = folder_of(pattern.removeprefix(_PACKAGE))
            return [] if folder is None else list(folder.rglob("*.py"))
        found = list(Path().glob(pattern))
        if not found:
            raise PrepareError(
                f"prepare: {self.creates} needs {pattern!r}, which matches no file below"
                f" {Path().absolute()}; correct or remove the pattern"
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
        try:
            resolve_command(prepare.command)
        except ValueError as error:
            raise ConfigError(f"prepare.{number}.command: {error}") from error
    return found


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """Options of a command: the writer of its output, its process mark, the variables that it
    inherits besides those of every child, its descriptors, and its time limit."""

    write: Callable[[str], object] = lambda text: None
    mark: str | None = None
    inherits: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    limit_s: float | None = None


async def execute_command(prepare: PrepareCommand, options: CommandOptions) -> None:
    """Run the command. Raises PrepareError. If cancelled, kill all its processes."""
    shown = redact(" ".join(prepare.command))
    mark = {MARK_VARIABLE: options.mark} if options.mark else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *resolve_command(prepare.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**child_environment(*options.inherits, *prepare.variables, ours=True), **mark},
            pass_fds=options.descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise PrepareError(f"cannot run `{shown}`: {error}") from error
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
    # The command may have left an up-to-date file untouched.
    os.utime(prepare.creates)


async def _forward_output(
    process: asyncio.subprocess.Process, write: Callable[[str], object]
) -> str:
    """Forward the redacted output of a process until it ends; return its last lines."""
    assert process.stdout is not None
    rest, tail = b"", ""
    while True:
        block = await process.stdout.read(_BLOCK)
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if not block or len(rest) > _BLOCK:
            # The last line may lack a newline; a line may be too long to hold back.
            lines, newline, rest = lines + newline + rest, b"", b""
        # Redact before the cut: it could leave half of a secret.
        text = redact((lines + newline).decode(errors="replace"))
        write(text)
        tail = (tail + text)[-_TAIL_CHARACTERS:]
        if not block:
            return tail


def _missing_module_hint(prepare: PrepareCommand, output: str) -> str:
    """Suggest a fix if the command imports a module by its old name, or this interpreter lacks one
    because it is not the services' one."""
    if moved := explain_old_import(output):
        return f"\n{moved}"
    lacking = _NO_MODULE.search(output)
    if lacking is None or prepare.command[0] not in ("python", "flotilla"):
        return ""
    command = shlex.join((f".venv/bin/{prepare.command[0]}", *prepare.command[1:]))
    folder = shlex.quote(str(Path.cwd()))
    return (
        f"\n{sys.executable} has no {lacking[1]}: create {prepare.creates} beforehand on this"
        f" machine, with .venv (`make setup`), which has it:\n  cd {folder} && {command}"
    )


async def prepare_run(intent: PendingRun, notify: Callable[[str], None]) -> None:
    """Create the missing files of a run's `[[prepare]]` in the launcher's working folder, and
    notify of each. The output goes to the run's `logs/prepare.log`. Outdated files stay:
    other runs may be using them. Raises RunRefusedError."""
    try:
        wanted = parse_prepare_tables(intent.spec.tables)
        if all(prepare.is_done() for prepare in wanted):
            return
        async with _hold_prepare_lock(intent.run_dir.parent) as lock:
            for prepare in wanted:
                # Another run may have made it while this one waited for the lock.
                if not prepare.is_done():
                    notify(f"preparing: {prepare.creates}")
                    await _execute_logged(prepare, intent, lock)
    except (ConfigError, PrepareError) as error:
        raise RunRefusedError(f"cannot prepare the run: {error}") from error


async def _execute_logged(prepare: PrepareCommand, intent: PendingRun, lock: int) -> None:
    log = intent.run_dir / "logs" / f"{PREPARE_NAME}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:

        def write_log(text: str) -> None:
            file.write(text)
            file.flush()

        write_log(f"$ {redact(shlex.join(prepare.command))}\n")
        # The mark lets a launcher find and end it if the run ends first.
        mark = f"{intent.run_dir.parent.resolve()}:{intent.run.run_id}/{PREPARE_NAME}"
        inherits = variables_of_any_service(intent.spec)
        await execute_command(prepare, CommandOptions(write_log, mark, inherits, (lock,), LIMIT_S))


@asynccontextmanager
async def _hold_prepare_lock(runs: Path) -> AsyncGenerator[int]:
    """Hold the prepare lock: two runs may need the same file. The command inherits the lock,
    and so keeps it when its launcher dies."""
    deadline = time.monotonic() + LIMIT_S
    with (runs / f"{PREPARE_NAME}.lock").open("a") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise PrepareError(f"another run has been preparing for {LIMIT_S:g} s")
            await asyncio.sleep(_POLL_S)
        yield file.fileno()


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
