"""Pool of verifier processes, started in advance; each is killed if its verifier hangs."""

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.limits.adaptive_concurrency import ConcurrencyLimit
from flotilla_env_gateway.limits.fair_queue import WeightOf, equal_weight
from flotilla_env_gateway.limits.request_gates import Gate
from flotilla_env_gateway.ports import Execution, Verification
from flotilla_env_gateway.verify import sandbox
from flotilla_env_gateway.verify.check_report import split_report
from flotilla_env_gateway.verify.protocol import ProtocolError
from flotilla_env_gateway.verify.sandbox import Sandbox
from flotilla_env_gateway.verify.verifier_process import (
    StartError,
    VerifierProcess,
    WorkerDiedError,
)

_LOG = get_logger(__name__)
# A process is replaced after so many trusted verifiers, because they may leave something behind.
_JOBS_PER_WORKER = 500
# CPU seconds beyond a verifier's time limit.
_CPU_MARGIN_S = 2
_REFUSED = (
    "a verifier that is not listed by its SHA-256 runs only in a sandbox, and {why}. Install "
    "bubblewrap (apt-get install bubblewrap) where that is the reason, or list it in the file "
    "env_gateway.verifiers.digests, or set env_gateway.verifiers.unsafe_local_verifiers = true to "
    "run any with all rights of this process"
)


class SpareProcesses:
    """Fresh processes; `count` of them are started in advance once the first is taken."""

    def __init__(
        self, start: Callable[[], Coroutine[Any, Any, VerifierProcess]], count: int
    ) -> None:
        self._start = start
        self._count = count
        self._starting: deque[asyncio.Task[VerifierProcess]] = deque()

    async def take_process(self) -> VerifierProcess:
        """Take a running process, and start replacements. Raises StartError."""
        worker = await self._take_ready() or await self._wait_for_start(self._begin_start())
        while len(self._starting) < self._count:
            self._starting.append(self._begin_start())
        return worker

    async def close(self) -> None:
        starting, self._starting = self._starting, deque()
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, VerifierProcess):
                await result.kill()

    async def _take_ready(self) -> VerifierProcess | None:
        while self._starting:
            try:
                worker = await self._wait_for_start(self._starting.popleft())
            except StartError as error:
                _LOG.warning("verifier_process_not_started", error=str(error))
                continue
            if worker.is_alive:
                return worker
            await worker.kill()
        return None

    def _begin_start(self) -> asyncio.Task[VerifierProcess]:
        return asyncio.create_task(self._start())

    async def _wait_for_start(self, starting: asyncio.Task[VerifierProcess]) -> VerifierProcess:
        """Wait for a process to start; a cancelled waiter leaves it for the next."""
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._starting.appendleft(starting)
            raise


class VerifierPool:
    """A Grader with up to `size` processes, shared fairly between runs by weight.

    Trusted verifiers share plain processes; those that need packages share others, which have
    imported `modules`, each (folder, module, SHA-256). Each other one gets its own sandboxed
    process, which ends with it; with `unsafe`, a plain process if there can be no sandbox.
    """

    def __init__(
        self,
        *,
        size: int,
        memory_bytes: int,
        cpu_s: float = 30.0,
        unsafe: bool = False,
        modules: Sequence[tuple[str, str, str]] = (),
        weight_of: WeightOf = equal_weight,
    ) -> None:
        self._size = size
        self._plain = sandbox.plain_command(memory_bytes)
        # By whether a verifier needs packages.
        self._commands = {False: self._plain, True: sandbox.packages_command(memory_bytes, modules)}
        self._kinds = [False, True] if modules else [False]
        self._unsafe = unsafe
        self._sandbox = Sandbox.find_installed(
            memory_bytes=memory_bytes, cpu_s=int(cpu_s) + _CPU_MARGIN_S
        )
        self._places = Gate(ConcurrencyLimit(size), weight_of=weight_of)
        self._idle: dict[bool, deque[VerifierProcess]] = {False: deque(), True: deque()}
        self._running: set[VerifierProcess] = set()
        self._spares = SpareProcesses(self._start_untrusted, size)

    @property
    def sandbox_limits(self) -> list[str]:
        """Limits of a verifier in the sandbox, as text; empty without a sandbox."""
        return self._sandbox.limits if self._sandbox else []

    async def start_workers(self) -> None:
        """Start the processes for trusted verifiers before the first grade. Raises StartError; then
        none is left."""
        for packages in self._kinds:
            starting = (self._start_trusted(packages=packages) for _ in range(self._size))
            results = await asyncio.gather(*starting, return_exceptions=True)
            self._idle[packages].extend(
                each for each in results if isinstance(each, VerifierProcess)
            )
            if error := next((each for each in results if isinstance(each, BaseException)), None):
                await self.close()
                raise error

    async def run_verifier(self, verification: Verification, *, timeout_s: float) -> Execution:
        async with self._places.hold_place(verification.run_id, math.inf):
            try:
                worker = await self._take_worker(verification)
            except StartError as error:
                _LOG.warning("verifier_not_run", error=str(error))
                digest = hashlib.sha256(verification.source.encode()).hexdigest()
                message = (
                    str(error) if verification.trusted else f"{error} (its SHA-256 is {digest})"
                )
                return Execution(error=message, retryable=verification.trusted, ran=False)
            self._running.add(worker)
            try:
                return await _run_verification(worker, verification, timeout_s)
            finally:
                fresh = not worker.busy and worker.jobs < _JOBS_PER_WORKER
                await self._put_back(worker, verification, keep=fresh and verification.trusted)

    async def close(self) -> None:
        workers = {*self._idle[False], *self._idle[True], *self._running}
        self._idle = {False: deque(), True: deque()}
        await self._spares.close()
        await asyncio.gather(*(worker.kill() for worker in workers))

    async def _take_worker(self, verification: Verification) -> VerifierProcess:
        if not verification.trusted:
            return await self._spares.take_process()
        idle = self._idle[verification.packages]
        return idle.popleft() if idle else await self._start_trusted(packages=verification.packages)

    async def _put_back(
        self, worker: VerifierProcess, verification: Verification, *, keep: bool
    ) -> None:
        if keep:
            self._idle[verification.packages].append(worker)
        else:
            await worker.kill()
        self._running.discard(worker)

    async def _start_trusted(self, *, packages: bool) -> VerifierProcess:
        return await VerifierProcess.start_process(self._commands[packages])

    async def _start_untrusted(self) -> VerifierProcess:
        why = "bubblewrap is not installed here"
        if self._sandbox is not None:
            try:
                return await VerifierProcess.start_process(self._sandbox.make_command())
            except StartError as error:
                why = f"that fails here: {error}{sandbox.kernel_settings_hint()}"
        if not self._unsafe:
            raise StartError(_REFUSED.format(why=why))
        _LOG.warning("verifier_without_sandbox", why=why)
        return await VerifierProcess.start_process(self._plain)


async def _run_verification(
    worker: VerifierProcess, verification: Verification, timeout_s: float
) -> Execution:
    try:
        async with asyncio.timeout(timeout_s):
            done = await worker.run_verification(verification)
        score, report, rewards = split_report(done.result)
        raised = done.error is not None
        return Execution(score, report, done.stdout, done.error, raised=raised, rewards=rewards)
    except TimeoutError:
        return Execution(error=f"the verifier did not end within {timeout_s:.1f} s", timed_out=True)
    except WorkerDiedError as error:
        _LOG.warning("verifier_process_died", error=str(error))
        return Execution(error=str(error), retryable=True)
    except ProtocolError as error:
        _LOG.warning("verifier_broke_the_protocol", error=str(error))
        return Execution(error=str(error), raised=True)
