"""Processes that execute verifiers: started on first use, kept warm, killed if they hang."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_WORKER = "flotilla_environments.fleet_emulator.verifier_worker"
_INHERITED = ("PATH", "PYTHONPATH", "LANG", "TMPDIR", "VIRTUAL_ENV")
_MAX_LINE_BYTES = 16 * 2**20
_GRACE_SECONDS = 5.0  # beyond the limit that the worker itself enforces
_START_SECONDS = 60.0

Answer = dict[str, Any]


class VerifierPool:
    """At most `size` executions at once; the others wait their turn."""

    def __init__(self, size: int, secrets: Mapping[str, str]) -> None:
        """`secrets`: variables for the workers in addition to their few inherited ones."""
        self._free = asyncio.Semaphore(size)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._environment |= secrets

    async def execute_job(self, job: Mapping[str, Any]) -> Answer:
        """Execute a job; its result is a failure of type TimeoutError when its time is over."""
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._start_worker()
            try:
                async with asyncio.timeout(job["timeout"] + _GRACE_SECONDS):
                    answer = await _exchange_lines(worker, job)
            except (TimeoutError, ConnectionError, ValueError) as error:
                return _failure_answer(error)
            else:
                self._idle.append(worker)
                return answer
            finally:
                if worker not in self._idle:
                    await self._end_worker(worker)

    async def close(self) -> None:
        for worker in list(self._all):
            await self._end_worker(worker)

    async def _start_worker(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            # The working directory is a user's: its modules must not shadow ours.
            *(sys.executable, "-P", "-m", _WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._all.add(worker)
        return worker

    async def _end_worker(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        with suppress(ProcessLookupError):  # the group, so that a child of it ends too
            os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()


async def _exchange_lines(worker: asyncio.subprocess.Process, job: Mapping[str, Any]) -> Answer:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(job).encode() + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()  # raises ValueError for one that is too long
    if not line:
        raise ConnectionResetError("the verifier's worker ended")
    return json.loads(line)


def _failure_answer(error: Exception) -> Answer:
    kind, message = type(error).__name__, str(error) or "the verifier did not end in time"
    details = {"type": kind, "message": message, "traceback": ""}
    return {"success": False, "result": None, "error": details, "stdout": ""}
