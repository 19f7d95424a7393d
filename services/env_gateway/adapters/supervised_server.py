"""The address of a server: a fixed URL, or the one that a supervised command prints."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.child_environment import child_environment
from services.common.concurrency import cancel_tasks, raise_failure
from services.common.log import get_logger
from services.common.printable_text import print_visible
from services.common.python_command import tied_command
from services.common.redaction import redact
from services.env_gateway.limits.backoff import Backoff
from services.env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.2, 10.0
# A server that ran this long was healthy: its next end is not a crash loop.
_HEALTHY_S = 60.0
_GRACE_S = 3.0
_LINE_BYTES = 2**16
# Bytes kept of a command's stderr, characters shown of it, and seconds to wait for it.
_WORDS_BYTES, _SHOWN_CHARS, _WORDS_S = 2**14, 600, 1.0


class ServerAddress(Protocol):
    @property
    def generation(self) -> int: ...

    async def wait_for_url(self, timeout_s: float) -> str:
        """Return the URL without a trailing slash. Raises BackendError if there is none in time."""
        ...

    async def close(self) -> None: ...


class FixedAddress:
    generation = 0

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def wait_for_url(self, timeout_s: float) -> str:
        return self._url

    async def close(self) -> None:
        """Do nothing: the server is not ours."""


class SupervisedServer:
    """A command that prints one JSON line {"url": ...} once it serves, and is restarted, with
    growing pauses, when it ends. The command must not outlive the gateway: it gets its own process
    group, a pipe as standard input that closes with us, and a signal if we are killed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._environment = environment or {}
        self._start_timeout_s = start_timeout_s
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self.generation = 0
        self._running = asyncio.create_task(self._keep_running())

    @property
    def pid(self) -> int | None:
        """The process, and process group, of the running server."""
        return self._process.pid if self._process is not None else None

    async def wait_for_url(self, timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._url)
        except TimeoutError:
            message = f"{self._command[0]} does not serve yet"
            raise BackendError("starting", message, delivered=False) from None

    async def close(self) -> None:
        await cancel_tasks([self._running])
        raise_failure([self._running])

    async def _keep_running(self) -> None:
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S)
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                why = await self._run_once()
            except OSError as error:
                _LOG.exception("environment_server_not_started", error=str(error))
                why = f"it cannot be started: {error}"
            if not self._url.done():
                # Waiters get the reason at once, and may wait for the next start.
                message = f"{shlex.join(self._command)} does not serve: {why}"
                self._url.set_exception(BackendError("not_started", message, delivered=False))
                self._url.exception()
            self._url = loop.create_future()
            self.generation += 1
            if loop.time() - started > _HEALTHY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_wait_s())

    async def _run_once(self) -> str:
        """Run the command until it ends; return why it does not serve, or has stopped."""
        process = await spawn_process(self._command, self._environment)
        self._process, words = process, StderrTail(process)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._url.set_result(await _read_announced_url(process))
            await _drain_output(process)
            why = await words.describe_end()
            _LOG.error("environment_server_ended", command=self._command[0], why=why)
        except TimeoutError:
            why = f'no line {{"url": ...}} from it within {self._start_timeout_s:g} s'
            _LOG.error("environment_server_not_serving", error=why)
        except ValueError as error:
            why = f"{error}; {await words.describe_end()}"
            _LOG.error("environment_server_not_serving", error=why)
        finally:
            await asyncio.shield(end_process_group(process))
            await words.close()
        return why


class StderrTail:
    """The end of a command's standard error, kept while all of it is passed on to our own: only
    there is the reason why the command ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._kept = b""
        self._reading = asyncio.create_task(self._read_stderr())

    async def describe_end(self) -> str:
        """Describe how the command ended, with the last line that it wrote."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WORDS_S):
                await self._process.wait()
                await asyncio.shield(self._reading)
        code = self._process.returncode
        ended = "it closed its output" if code is None else f"it ended with code {code}"
        lines = [
            line for line in self._kept.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        return f"{ended} and wrote: {lines[-1].strip()[:_SHOWN_CHARS]}" if lines else ended

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        begun = b""
        while piece := await self._process.stderr.read(_LINE_BYTES):
            # By lines, because a piece could end in the middle of a secret.
            lines, newline, begun = (begun + piece).rpartition(b"\n")
            if len(begun) > _LINE_BYTES:
                lines, newline, begun = lines + newline + begun, b"", b""
            self._pass_on(lines + newline)
        self._pass_on(begun)

    def _pass_on(self, output: bytes) -> None:
        clean = redact(output.decode("utf-8", "replace"))
        print_visible(clean, end="", file=sys.stderr)
        self._kept = (self._kept + clean.encode())[-_WORDS_BYTES:]


async def spawn_process(
    command: Sequence[str], environment: Mapping[str, str], *, limit: int = _LINE_BYTES
) -> asyncio.subprocess.Process:
    """Start a command that writes lines of at most `limit` bytes and cannot outlive us. It gets
    `environment` in addition to that of any child. Its standard error is a pipe that must be read,
    as StderrTail does. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *tied_command(signal.SIGKILL, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=limit,
        env={**child_environment(), **environment},
    )


async def _read_announced_url(process: asyncio.subprocess.Process) -> str:
    """Read the URL from the first line that is a JSON object with one. Raises ValueError if the
    output ends without it."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        with suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and isinstance(url := message.get("url"), str):
                return url.rstrip("/")
    raise ValueError('the command ended without printing {"url": ...}')


async def _drain_output(process: asyncio.subprocess.Process) -> None:
    """Drain the output: a server that prints would block on a full pipe."""
    assert process.stdout is not None
    while await process.stdout.read(_LINE_BYTES):
        continue


async def end_process_group(process: asyncio.subprocess.Process) -> None:
    """Terminate the whole process group; kill it if it does not end in time."""
    assert process.stdin is not None
    process.stdin.close()
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
