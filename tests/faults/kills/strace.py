"""Kills and errors at one system call on chosen files, by strace.

    write(3</run/journal.sqlite-wal>, ...) = ?     killed before it did anything

The N-th call of a thread on these files is hit. Killed before the N-th is killed after the
one before, so all N together are every boundary.
"""

import asyncio
import re
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

# By what they do; the names that a file system operation has on this and other machines.
CALLS = {
    "write": ("write", "pwrite64", "writev", "ftruncate"),
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "renameat", "renameat2"),
    "remove": ("unlink", "unlinkat", "rmdir"),
    "create": ("openat", "mkdir", "mkdirat"),
}
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_OPEN = re.compile(r"<(/[^>]+)>")
_NAMED = re.compile(r"\"([^\"]+)\"")


@cache
def why_not() -> str:
    """Return why there can be no injection here, "" when there can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    command = ["strace", "-f", "-e", "trace=write", "-e", "inject=write:signal=SIGKILL:when=1"]
    victim = [sys.executable, "-c", "print(1)"]
    done = subprocess.run([*command, *victim], capture_output=True, text=True, check=False)
    if "killed by SIGKILL" in done.stderr:
        return ""
    return f"strace cannot trace or kill here: {done.stderr.strip()[-200:]}"


@dataclass(frozen=True, slots=True)
class Injection:
    """An event at the `when`-th of `calls` on `paths`: `signal=SIGKILL`, `error=ENOSPC`."""

    calls: tuple[str, ...]
    paths: Sequence[Path]
    effect: str = "signal=SIGKILL"
    # As strace has it: "3", or "3+" for the third and all that follow.
    when: str = "1"


class Call(NamedTuple):
    """A system call that was begun, by which thread, and the first file that it names."""

    thread: int
    name: str
    path: Path


class Strace:
    """Watches one process that waits to be released, and hits it."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def attach(cls, pid: int, injection: Injection, log: Path) -> "Strace":
        calls = ",".join(injection.calls)
        paths = [word for path in injection.paths for word in ("-P", str(path))]
        process = await asyncio.create_subprocess_exec(
            *("strace", "-f", "-y", "-qqq", "-s", "0", "-p", str(pid), "-o", str(log), *paths),
            *("-e", f"trace={calls}"),
            *("-e", f"inject={calls}:{injection.effect}:when={injection.when}"),
            stderr=PIPE,
        )
        while _tracer(pid) != process.pid:
            assert process.returncode is None, "strace has ended"
            await asyncio.sleep(0.005)
        return cls(process, log)

    async def ended(self) -> None:
        await self._process.communicate()

    async def detach(self) -> None:
        """Leave the process as it is."""
        self._process.terminate()
        await self.ended()

    def calls(self) -> list[Call]:
        """The calls on the files, in order. The last is the one that was hit."""
        found: list[Call] = []
        for line in self._log.read_text().splitlines():
            call = _LINE.match(line)
            path = _path(call[3]) if call else None
            if call and path:
                found.append(Call(int(call[1]), call[2], path))
        return found


def _tracer(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("TracerPid:")[1].split()[0])


def _path(arguments: str) -> Path | None:
    """The first file that a call names, by descriptor or by name, or by name in an open folder."""
    opened, named = _OPEN.search(arguments), _NAMED.search(arguments)
    if named:
        return Path(opened[1] if opened else "/", named[1])
    return Path(opened[1]) if opened else None
