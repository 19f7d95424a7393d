"""Channels to child processes of ours: lines of JSON over their stdin and stdout."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import tied_command
from flotilla_common.text.json_lines import encode_line

_LINE_BYTES = 1 << 20
_END_BYTES = 4096


class ChildLostError(Exception):
    """The child has ended, or does not answer; the message names it, and has the end of its log."""


class LineChannel:
    """The channel to one child, running or ended; messages call it `name`.

    The child ends when its stdin does, as it does with this process. Its stderr is appended to
    `log_path`, or is this process's own. `parent_channel.py` is the child's side."""

    def __init__(self, name: str, process: Process, log_path: Path | None, limit: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._process = process
        self._log_path = log_path
        self._limit = limit
        self._turn = asyncio.Lock()
        # Questions whose answers have not been read: those of askers that gave up are skipped.
        self._unanswered = 0
        self._closing: asyncio.Task[None] | None = None
        self.stdin, self.stdout = process.stdin, process.stdout

    @staticmethod
    async def start_child(
        name: str,
        command: Sequence[str],
        log_path: Path | None,
        *kept: str,
        more: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        tied: bool = False,
        folder: Path | None = None,
        limit: int = _LINE_BYTES,
    ) -> "LineChannel":
        """Start `command` with the part of `environ`, by default this process's, for our own
        children, including the variables `kept`, and with `more`. It writes lines of at most
        `limit` bytes. Raises OSError.

        A child that is `tied` is killed with this process: one that may be too busy to notice the
        end of its stdin, and has nothing to clean up. A start that is cancelled kills the child,
        which has started nothing of its own yet: it has read no line."""
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
        log = None if log_path is None else log_path.open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *(tied_command(signal.SIGKILL, *command) if tied else command),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**child_environment(*kept, ours=True, environ=environ), **(more or {})},
                cwd=folder,
                limit=limit,
                # Ctrl-C in the terminal is for the service, which ends its children in order.
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()
        return LineChannel(name, process, log_path, limit)

    @property
    def pid(self) -> int:
        """Process number of the child."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the child, the negative signal number if a signal killed it; None while it
        runs."""
        return self._process.returncode

    @property
    def lost(self) -> str | None:
        """How the child has ended, with the end of its log; None while it runs."""
        code = self.exit_code
        if code is None:
            return None
        return self._explain(
            f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        )

    async def wait_until_lost(self) -> str:
        """Wait until the child has ended; return how."""
        await self._process.wait()
        assert self.lost is not None
        return self.lost

    def send(self, message: Any) -> None:
        """Send a message, a dataclass or JSON; that the child has ended shows when it is read."""
        self.stdin.write(encode_line(message))

    async def ask(self, message: Any, seconds: float | None = None) -> Any:
        """Send a message and return its answer, one JSON value, which must come in so many seconds.
        Askers take turns. Raises ChildLostError."""
        async with self._turn:
            self.send(message)
            self._unanswered += 1
            async with self.answering_within(seconds):
                while True:
                    line = await self._read_line()
                    self._unanswered -= 1
                    if not self._unanswered:
                        return json.loads(line)

    async def read_line(self, seconds: float | None = None) -> bytes:
        """Return the next line, which must come in so many seconds. Raises ChildLostError."""
        async with self.answering_within(seconds):
            return await self._read_line()

    @asynccontextmanager
    async def answering_within(self, seconds: float | None) -> AsyncGenerator[None]:
        """Give the lines that are read in the block so many seconds. Raises ChildLostError."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ChildLostError(self._explain(f"has not answered for {seconds:g} s")) from None

    def kill(self) -> None:
        """Kill the child if it is still running."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, seconds: float = 0.0) -> None:
        """End the child by its stdin, or kill it after `seconds`; return once it is gone. Goes on
        if the caller is cancelled. May be called again, also concurrently."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_within(seconds))
        await asyncio.shield(self._closing)

    def describe_log_end(self) -> str:
        """Return the end of the log with the log's path, for a message."""
        return "" if self._log_path is None else describe_log_end(self._log_path)

    async def _end_within(self, seconds: float) -> None:
        self.stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _read_line(self) -> bytes:
        try:
            line = await self.stdout.readline()
        except ValueError:
            # What follows is the rest of that line.
            self.kill()
            raise ChildLostError(self._explain(f"wrote a line above {self._limit} bytes")) from None
        if not line.endswith(b"\n"):
            raise ChildLostError(await self.wait_until_lost())
        return line

    def _explain(self, ending: str) -> str:
        log = self.describe_log_end()
        return f"{self._name} {ending}; {log}" if log else f"{self._name} {ending}"


def describe_log_end(log_path: Path) -> str:
    """Return the end of a log with its path, for a message. Never fails."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            text = file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"(cannot read its log {log_path}: {error})"
    return f"end of {log_path}:\n{text}" if text else f"({log_path} is empty)"
