"""Child processes with pipes for stdin and stdout, and a log file for stderr."""

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.child_environment import child_environment

_END_BYTES = 4096


class LoggedChild:
    """A child, running or ended. Its stderr is appended to `log_path`."""

    def __init__(self, process: Process, log_path: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._log_path = log_path
        self.stdin, self.stdout = process.stdin, process.stdout

    @staticmethod
    async def start_child(
        command: Sequence[str], log_path: Path, *kept: str, more: Mapping[str, str] | None = None
    ) -> "LoggedChild":
        """Start `command` with the environment of our own children, plus the variables `kept` of
        this process and those in `more`. Raises OSError."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**child_environment(*kept, ours=True), **(more or {})},
                # Ctrl-C in the terminal is for the service, which ends its children in order.
                start_new_session=True,
            )
        return LoggedChild(process, log_path)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the child, the negative signal number if a signal killed it; None while it
        runs."""
        return self._process.returncode

    async def wait_until_ended(self) -> int:
        """Wait until the child has ended; return its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the child if it is still running."""
        if self.exit_code is None:
            self._process.kill()

    async def end_within(self, seconds: float) -> None:
        """Wait for a child that is about to end; kill it after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def describe_log_end(self) -> str:
        """Return the end of the log with the log's path, for a message."""
        return describe_log_end(self._log_path)


def describe_log_end(log_path: Path) -> str:
    """Return the end of a log with its path, for a message. Never fails."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            text = file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"(cannot read its log {log_path}: {error})"
    return f"end of {log_path}:\n{text}" if text else f"({log_path} is empty)"
