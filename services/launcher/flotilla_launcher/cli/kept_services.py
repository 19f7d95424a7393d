"""Services that a command runs itself: started, started again when they end, and ended with it."""

import asyncio
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.aio.concurrency import raise_failure, running_tasks, wait_for_any
from flotilla_common.healthcheck import check_health
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.exit_codes import CONFIG
from flotilla_common.process.line_channel import describe_log_end
from flotilla_common.process.python_command import tied_command
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.process_end import end_process

_POLL_S = 0.5
_PROBE_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
# To finish what they are at.
_END_S = 20.0


@dataclass(frozen=True, slots=True)
class KeptService:
    """A service, as it is started each time. `address` is that of its health, `inherits` names
    variables of this process that it gets, and `variables` are further ones."""

    name: str
    command: Sequence[str]
    address: str
    log: Path
    inherits: Sequence[str]
    variables: Mapping[str, str]


@asynccontextmanager
async def kept_services(
    services: Sequence[KeptService], show: Callable[[str], None]
) -> AsyncGenerator[asyncio.Task[None]]:
    """Run services during the block, which begins once all of them serve. Yield a task that ends
    only by an error: one of them cannot be kept. Raises CommandError if one does not start."""
    served = [asyncio.Event() for _ in services]
    async with running_tasks(_keep_all(services, served, show), _wait_for_all(served)) as tasks:
        keeping, _ = tasks
        await wait_for_any(tasks)
        raise_failure([keeping])
        yield keeping


async def _wait_for_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _keep_all(
    services: Sequence[KeptService], served: Sequence[asyncio.Event], show: Callable[[str], None]
) -> None:
    keeping = [_keep(each, event, show) for each, event in zip(services, served, strict=True)]
    async with running_tasks(*keeping) as tasks:
        await wait_for_any(tasks)
        raise_failure(tasks)


async def _keep(service: KeptService, served: asyncio.Event, show: Callable[[str], None]) -> None:
    """Run a service again and again. Raises CommandError if it has never served, or refuses its
    configuration."""
    wait_s = _FIRST_WAIT_S
    while True:
        before = served.is_set()
        async with _started(service) as process:
            if await _serves(service, process):
                served.set()
                wait_s = _FIRST_WAIT_S
                if before:
                    show(f"{service.name} serves again")
            code = await process.wait()
        if code == CONFIG or not served.is_set():
            end = describe_log_end(service.log)
            raise CommandError(f"{service.name} ended with code {code}; {end}")
        show(f"{service.name} ended with code {code}; it is started again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


@asynccontextmanager
async def _started(service: KeptService) -> AsyncGenerator[Process]:
    """Run a process of the service; end it with the block."""
    service.log.parent.mkdir(parents=True, exist_ok=True)
    with service.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *tied_command(signal.SIGTERM, *service.command),
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            env={**child_environment(*service.inherits, ours=True), **service.variables},
            # Ctrl-C is for this process, which ends them.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await end_process(process, _END_S)


async def _serves(service: KeptService, process: Process) -> bool:
    """Wait until the service serves; return False if its process ends before."""
    while process.returncode is None:
        if not await check_health(service.address, None, _PROBE_S):
            return True
        await asyncio.sleep(_POLL_S)
    return False
