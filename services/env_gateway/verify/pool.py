"""Verifier workers, forked ahead; each runs one verifier at a time and is killed if it hangs."""

import asyncio
import base64
import json
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import services
from services.common.log import get_logger
from services.env_gateway.ports import BackendError, Execution, QueryError, Verification

_LOG = get_logger(__name__)
_LINE_BYTES = 64 * 2**20
# A worker that has run so many verifiers is replaced, whatever they left behind in it.
_JOBS_PER_WORKER = 500
_WORKER = "services.env_gateway.verify.worker"


class _WorkerDiedError(Exception):
    """The process ended, or wrote something that is not the protocol."""


class _InstanceError(Exception):
    """The environment failed while a verifier asked it; not the verifier's fault."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(str(error))
        self.lost = error.lost


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.jobs = 0

    @classmethod
    async def start(cls, memory_bytes: int) -> "_Worker":
        root = Path(services.__path__[0]).parent
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-E", "-s", "-m", _WORKER, str(memory_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=root,
            env={"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            limit=_LINE_BYTES,
            start_new_session=True,
        )
        return cls(process)

    async def run(self, verification: Verification) -> Mapping[str, Any]:
        """Serve one verifier's questions until it is done. Raises _WorkerDiedError and
        _InstanceError."""
        self.jobs += 1
        self._send(
            {
                "source": verification.source,
                "function": verification.function,
                "arguments": verification.arguments,
            }
        )
        while True:
            message = await self._receive()
            if "done" in message:
                return message["done"]
            try:
                self._send(await _answer(verification, message))
            except BackendError as error:
                raise _InstanceError(error) from error

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        self._stdin.close()
        await self._process.wait()

    def _send(self, message: Any) -> None:
        if self._process.returncode is not None:
            raise _WorkerDiedError(f"the worker ended with {self._process.returncode}")
        self._stdin.write(json.dumps(message).encode() + b"\n")

    async def _receive(self) -> dict[str, Any]:
        try:
            line = await self._stdout.readline()
            message = json.loads(line)
        except (ValueError, ConnectionError) as error:
            raise _WorkerDiedError("the worker ended while a verifier ran") from error
        if not isinstance(message, dict):
            raise _WorkerDiedError("the worker wrote something else than an object")
        return message


async def _answer(verification: Verification, question: Mapping[str, Any]) -> Any:
    if "snapshot" in question:
        content = await verification.snapshot(question["snapshot"])
        return None if content is None else base64.b64encode(content).decode()
    try:
        rows = await verification.query(question["db"], question["query"], question["args"])
    except QueryError as error:
        return {"error": str(error)}
    return {"columns": rows.columns, "rows": [[_plain(v) for v in row] for row in rows.rows]}


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


class VerifierPool:
    """A Grader over `size` processes. Grades wait for a free one, in order of arrival."""

    def __init__(self, *, size: int, memory_bytes: int) -> None:
        self._size = size
        self._memory_bytes = memory_bytes
        self._free = asyncio.Semaphore(size)
        self._idle: deque[_Worker] = deque()
        self._all: set[_Worker] = set()

    async def start(self) -> None:
        """Start all workers ahead of the first grade."""
        for worker in await asyncio.gather(*(self._new() for _ in range(self._size))):
            self._idle.append(worker)

    async def execute(self, verification: Verification, *, timeout_s: float) -> Execution:
        async with self._free:
            worker = self._idle.popleft() if self._idle else await self._new()
            reusable = False
            try:
                async with asyncio.timeout(timeout_s):
                    done = await worker.run(verification)
                reusable = worker.jobs < _JOBS_PER_WORKER
                return Execution(
                    result=done.get("result"), stdout=done["stdout"], error=done.get("error")
                )
            except TimeoutError:
                return Execution(
                    error=f"the verifier did not end within {timeout_s:.1f} s", timed_out=True
                )
            except _InstanceError as error:
                return Execution(
                    error=str(error), instance_lost=error.lost, retryable=not error.lost
                )
            except _WorkerDiedError as error:
                _LOG.warning("verifier_worker_died", error=str(error))
                return Execution(error=str(error), retryable=True)
            finally:
                await self._put_back(worker, reusable=reusable)

    async def close(self) -> None:
        workers, self._all = self._all, set()
        self._idle.clear()
        await asyncio.gather(*(worker.kill() for worker in workers))

    async def _new(self) -> _Worker:
        worker = await _Worker.start(self._memory_bytes)
        self._all.add(worker)
        return worker

    async def _put_back(self, worker: _Worker, *, reusable: bool) -> None:
        if reusable:
            self._idle.append(worker)
        else:
            self._all.discard(worker)
            await worker.kill()
