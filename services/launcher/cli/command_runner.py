"""Runner of a command: handles Ctrl-C, and turns errors into a message and an exit code."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from services.common import rpc
from services.common.errors import ConfigError
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    LauncherConnection,
    LauncherError,
    connect_to_launcher,
    describe_failure,
)
from services.launcher.cli.progress_view import RunConsole
from services.launcher.cli.run_source import NoRunError, RunSource, find_run, open_run_source
from services.launcher.cli.terminal import Terminal

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130


def with_run_launcher(
    run_id: str, runs: Path, work: Callable[[LauncherConnection, str], Awaitable[None]]
) -> int:
    """Call `work` with a run's id and its launcher, and turn errors into a message and an exit
    code."""

    async def call_launcher(known: RunSource, interrupts: Interrupts) -> int:
        found = (await interrupts.unless_interrupted(find_run(known, run_id))).run_id

        async def do_work(connection: LauncherConnection) -> None:
            await work(connection, found)

        async with known.open_launcher() as connection:
            await interrupts.unless_interrupted(do_work(connection))
        return OK

    return with_run_source(runs, call_launcher)


def with_run_source(runs: Path, work: Callable[[RunSource, Interrupts], Awaitable[int]]) -> int:
    """Call `work` with the run source, and turn errors into a message and an exit code."""

    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.catch_signals():
            async with open_run_source(runs, interrupts) as known:
                return await work(known, interrupts)

    try:
        return asyncio.run(main())
    except (NoRunError, LauncherError, ConfigError) as error:
        return report_error(str(error))
    except InterruptedByUserError:
        return INTERRUPTED
    except grpc.aio.AioRpcError as error:
        return report_error(describe_failure(error))


def with_launcher(
    runs: Path,
    work: Callable[[LauncherConnection, Interrupts], Awaitable[int]],
    *,
    start: bool = True,
) -> int:
    """Call `work` with the launcher, and turn errors into a message and an exit code."""

    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.catch_signals():
            async with connect_to_launcher(runs, interrupts, start=start) as connection:
                return await work(connection, interrupts)

    try:
        return asyncio.run(main())
    except ConfigError as error:
        return _report_error(str(error), BAD_SPEC)
    except LauncherError as error:
        return _report_error(str(error), FAILED)
    except InterruptedByUserError:
        return INTERRUPTED
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        bad_spec = known is not None and known.reason == "BAD_SPEC"
        return _report_error(describe_failure(error), BAD_SPEC if bad_spec else FAILED)


def report_error(message: str) -> int:
    """Print an error message and return the exit code."""
    Terminal().print(f"error: {message}", soft_wrap=True)
    return FAILED


def print_text(text: str) -> None:
    RunConsole().print(text, markup=False, highlight=False, soft_wrap=True)


def _report_error(message: str, code: int) -> int:
    print_text(f"error: {message}")
    return code
