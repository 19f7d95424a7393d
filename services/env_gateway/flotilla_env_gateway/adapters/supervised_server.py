"""The address of a server: a fixed URL, or the one that a supervised command prints."""

import asyncio
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress

from flotilla_common.aio.concurrency import cancel_tasks, raise_failure
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters.child_process import ChildProcess
from flotilla_env_gateway.adapters.event_stream import LINES_AT_ONCE
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.2, 10.0
# A server that ran this long was healthy: its next end is not a crash loop.
_HEALTHY_S = 60.0
_PIECE_BYTES = 2**16


class ServerAddress(ABC):
    """A server's current URL. `generation` grows with each start of a supervised server."""

    generation = 0

    @abstractmethod
    async def wait_for_url(self, timeout_s: float) -> str:
        """Return the URL as written. Raises BackendError if there is none in time."""

    async def wait_for_root(self, timeout_s: float) -> str:
        """Return the URL for paths to be appended. Raises BackendError."""
        return (await self.wait_for_url(timeout_s)).rstrip("/")

    @abstractmethod
    async def close(self) -> None: ...


class FixedAddress(ServerAddress):
    def __init__(self, url: str) -> None:
        self._url = url

    async def wait_for_url(self, timeout_s: float) -> str:
        return self._url

    async def close(self) -> None:
        """Do nothing: the server is not ours."""


class SupervisedServer(ServerAddress):
    """A command that prints one JSON line {"url": ...} once it serves, and is restarted, with
    growing pauses, when it ends."""

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
        self._process: ChildProcess | None = None
        self._running = asyncio.create_task(self._keep_running())

    @property
    def pid(self) -> int | None:
        """The process that ends, and is killed, with the running server."""
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
        process = self._process = await ChildProcess.start(self._command, self._environment)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._url.set_result(await _read_announced_url(process.stdout))
            await _drain_output(process.stdout)
            why = await process.describe_end()
            _LOG.error("environment_server_ended", command=self._command[0], why=why)
        except TimeoutError:
            why = f'no line {{"url": ...}} from it within {self._start_timeout_s:g} s'
            _LOG.error("environment_server_not_serving", error=why)
        except ValueError as error:
            why = f"{error}; {await process.describe_end()}"
            _LOG.error("environment_server_not_serving", error=why)
        finally:
            await process.close()
        return why


async def _read_announced_url(output: asyncio.StreamReader) -> str:
    """Read the URL from the first line that is a JSON object with one. Raises ValueError if the
    output ends without it."""
    rest = b""
    while piece := await output.read(_PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        # Of a line without an end, only the end is kept.
        rest = rest[-_PIECE_BYTES:]
        for number, line in enumerate(lines):
            # Also before the first, because the piece may have been there already.
            if number % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if url := _parse_announcement(line):
                return url
    if url := _parse_announcement(rest):
        return url
    raise ValueError('the command ended without printing {"url": ...}')


def _parse_announcement(line: bytes) -> str | None:
    if not line.lstrip().startswith(b"{"):
        return None
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(url := message.get("url"), str):
            return url
    return None


async def _drain_output(output: asyncio.StreamReader) -> None:
    """Drain the output: a server that prints would block on a full pipe."""
    while await output.read(_PIECE_BYTES):
        continue
