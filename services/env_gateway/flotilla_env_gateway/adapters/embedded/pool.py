"""Worker processes for embedded environments, started in advance and restarted when one ends."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import flotilla_env_gateway
from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import TextLimits, TooLargeError, parse_json_aside
from flotilla_env_gateway.adapters.embedded import worker as embedded_worker
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import BackendError

_LOG = get_logger(__name__)
_BASE_S, _CAP_S = 0.1, 10.0
# A worker that ran this long was healthy: its next end is not a crash loop.
_HEALTHY_S = 60.0
_START_S = 60.0
# Limits of an answer, as for other servers: it may repeat what a policy wrote.
_ANSWERS = TextLimits(bytes=embedded_worker.MAX_ANSWER_BYTES, values=2**18)


@dataclass(eq=False, slots=True)
class _Request:
    line: bytes
    answer: asyncio.Future[dict[str, Any]]


class EnvironmentWorker:
    """One worker process. It handles one request at a time, so that the one that may have been
    executed is always known; the others wait here. A worker that takes `hang_s` for a request is
    killed.

    `instances` counts the instances placed on it."""

    def __init__(self, channel: LineChannel, hang_s: float) -> None:
        self._channel = channel
        self._hang_s = hang_s
        self._waiting: deque[_Request] = deque()
        self._running: _Request | None = None
        self._running_since = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self.ended = False
        self.instances = 0

    @property
    def pid(self) -> int:
        return self._channel.pid

    async def send_request(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return its answer. Raises BackendError; `lost` if the worker ends with
        its instances."""
        loop = asyncio.get_running_loop()
        request = _Request(await _encode_request(message), loop.create_future())
        if self.ended:
            raise _lost_error(delivered=False)
        self._waiting.append(request)
        self._send_next()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await request.answer
        except TimeoutError:
            delivered = None if request is self._running else False
            raise BackendError(
                "timeout", f"no answer in {timeout_s:.1f} s", delivered=delivered
            ) from None
        if "fault" in answer:
            raise BackendError("internal", answer["fault"], delivered=None)
        if "too_large" in answer:
            why = f"the answer is too large: {answer['too_large']}"
            raise BackendError("too_large", why, delivered=None, invalid=True)
        return answer

    async def wait_until_ready(self) -> None:
        """Wait until the worker has loaded the environments. Raises OSError if it fails to."""
        try:
            await self._channel.read_line(_START_S)
        except ChildLostError as error:
            raise OSError(str(error)) from error

    async def read_answers(self) -> None:
        """Read answers until the process ends."""
        try:
            while line := await self._channel.stdout.readline():
                self._take_answer(await _understood(line))
        except (ValueError, TypeError) as error:
            _LOG.exception("environment_worker_misspoke", error=str(error)[:200])
        finally:
            self._end_process()

    async def kill(self) -> None:
        self._end_process()
        await self._channel.close()

    def _take_answer(self, answer: dict[str, Any]) -> None:
        request, self._running = self._running, None
        if request is None:
            raise ValueError("an answer without a request")
        if not request.answer.done():
            request.answer.set_result(answer)
        self._send_next()

    def _send_next(self) -> None:
        """Send the next request. Requests whose callers have given up are dropped unexecuted."""
        while self._running is None and self._waiting and not self.ended:
            request = self._waiting.popleft()
            if request.answer.done():
                continue
            self._running = request
            loop = asyncio.get_running_loop()
            self._running_since = loop.time()
            if self._watch is None:
                self._watch = loop.call_later(self._hang_s, self._check_hang)
            self._channel.stdin.write(request.line)

    def _check_hang(self) -> None:
        """Kill a worker that hangs. One timer serves all requests: each only notes its start."""
        loop = asyncio.get_running_loop()
        self._watch = None
        if self._running is None:
            return
        left_s = self._running_since + self._hang_s - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._check_hang)
            return
        _LOG.error("environment_worker_hung", pid=self.pid, instances=self.instances)
        self._end_process()

    def _end_process(self) -> None:
        self.ended = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._channel.kill()
        running, self._running = self._running, None
        if running is not None and not running.answer.done():
            running.answer.set_exception(_lost_error(delivered=None))
        while self._waiting:
            request = self._waiting.popleft()
            if not request.answer.done():
                request.answer.set_exception(_lost_error(delivered=False))


class WorkerPool:
    """A pool of `size` workers, each kept running. It belongs to the event loop that creates
    it."""

    def __init__(self, *, size: int, hang_s: float) -> None:
        self._hang_s = hang_s
        self._workers: dict[int, EnvironmentWorker] = {}
        self._started = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep_running(slot)) for slot in range(size)]

    @property
    def workers(self) -> Sequence[EnvironmentWorker]:
        """The currently running workers."""
        return [worker for worker in self._workers.values() if not worker.ended]

    async def pick_worker(self, timeout_s: float) -> EnvironmentWorker:
        """Pick the worker with the fewest instances. Raises BackendError if none runs in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (workers := self.workers):
                    self._started.clear()
                    await self._started.wait()
        except TimeoutError:
            message = "no worker for embedded environments runs; see the log"
            raise BackendError("starting", message, delivered=False) from None
        return min(workers, key=lambda worker: worker.instances)

    async def close(self) -> None:
        await cancel_tasks(self._keepers)

    async def _keep_running(self, slot: int) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(base_s=_BASE_S, cap_s=_CAP_S)
        while True:
            started = loop.time()
            try:
                await self._run_once(slot)
            except OSError as error:
                _LOG.exception("environment_worker_not_started", error=str(error))
            if loop.time() - started > _HEALTHY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_wait_s())

    async def _run_once(self, slot: int) -> None:
        channel = await LineChannel.start_child(
            "a worker of embedded environments",
            python_command("-m", embedded_worker.__name__),
            None,
            tied=True,
            folder=Path(flotilla_env_gateway.__path__[0]).parent,
            limit=embedded_worker.MAX_ANSWER_BYTES,
        )
        worker = EnvironmentWorker(channel, self._hang_s)
        try:
            await worker.wait_until_ready()
            self._workers[slot] = worker
            self._started.set()
            await worker.read_answers()
            _LOG.error("environment_worker_ended", pid=worker.pid, instances=worker.instances)
        finally:
            await worker.kill()


async def _understood(line: bytes) -> dict[str, Any]:
    """Parse an answer; report one that is too large as an error. Raises ValueError or TypeError if
    the line is not an answer."""
    try:
        answer = await parse_json_aside(line, _ANSWERS)
    except TooLargeError as error:
        return {"too_large": str(error)}
    if not isinstance(answer, dict):
        raise TypeError(f"an answer that is a {type(answer).__name__}")
    return cast("dict[str, Any]", answer)


async def _encode_request(message: Mapping[str, Any]) -> bytes:
    try:
        return await run_aside_for(message, lambda: embedded_worker.encode(message))
    except (ValueError, RecursionError) as error:
        raise BackendError(
            "bad_request", f"not JSON: {error}", delivered=False, bad_arguments=True
        ) from error


def _lost_error(*, delivered: bool | None) -> BackendError:
    message = "the worker process of the environment ended"
    return BackendError("lost", message, delivered=delivered, lost=True)
