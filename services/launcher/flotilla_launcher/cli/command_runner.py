"""Runner of a command: handles Ctrl-C, and turns errors into a message and an exit code."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import grpc.aio

from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.launcher_client import (
    LauncherConnection,
    connect_to_launcher,
    describe_failure,
)
from flotilla_launcher.cli.progress_view import RunConsole
from flotilla_launcher.cli.run_source import RunSource, find_run, open_run_source
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.store.ledger import LedgerError

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130
P = ParamSpec("P")


def reports_errors(*, bad_spec: int = FAILED) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Make a decorator that has a command print its errors and return their exit code;
    `bad_spec` is that of a ConfigError."""

    def decorate(command: Callable[P, int]) -> Callable[P, int]:
        @wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return command(*args, **kwargs)
            except ConfigError as error:
                return report_error(str(error), bad_spec)
            except (CommandError, LedgerError) as error:
                return report_error(str(error))
            except InterruptedByUserError:
                return INTERRUPTED
            except grpc.aio.AioRpcError as error:
                known = rpc.service_error(error)
                refused = known is not None and known.reason == "BAD_SPEC"
                return report_error(describe_failure(error), bad_spec if refused else FAILED)

        return run

    return decorate


def run_interruptible(work: Callable[[Interrupts], Awaitable[int]]) -> int:
    """Call `work` with the user's interrupts and return its exit code."""

    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.catch_signals():
            return await work(interrupts)

    return asyncio.run(main())


def run_until_interrupted(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` to its end, or up to the user's Ctrl-C, and return the exit code."""

    async def main(interrupts: Interrupts) -> int:
        try:
            await interrupts.unless_interrupted(work)
        except InterruptedByUserError:
            return INTERRUPTED
        return OK

    return run_interruptible(main)


def with_run_launcher(
    run_id: str, runs: Path, work: Callable[[LauncherConnection, str], Awaitable[None]]
) -> int:
    """Call `work` with the launcher of a run and the run's id; print errors and return the exit
    code."""

    async def call_launcher(known: RunSource, interrupts: Interrupts) -> int:
        found = (await interrupts.unless_interrupted(find_run(known, run_id))).run_id

        async def do_work(connection: LauncherConnection) -> None:
            await work(connection, found)

        async with known.open_launcher() as connection:
            await interrupts.unless_interrupted(do_work(connection))
        return OK

    return with_run_source(runs, call_launcher)


@reports_errors()
def with_run_source(runs: Path, work: Callable[[RunSource, Interrupts], Awaitable[int]]) -> int:
    """Call `work` with the run source; print errors and return the exit code."""

    async def open_and_work(interrupts: Interrupts) -> int:
        async with open_run_source(runs, interrupts) as known:
            return await work(known, interrupts)

    return run_interruptible(open_and_work)


@reports_errors(bad_spec=BAD_SPEC)
def with_launcher(
    runs: Path,
    work: Callable[[LauncherConnection, Interrupts], Awaitable[int]],
    *,
    start: bool = True,
) -> int:
    """Call `work` with the launcher; print errors and return the exit code."""

    async def connect_and_work(interrupts: Interrupts) -> int:
        async with connect_to_launcher(runs, interrupts, start=start) as connection:
            return await work(connection, interrupts)

    return run_interruptible(connect_and_work)


def report_error(message: str, code: int = FAILED) -> int:
    """Print an error message and return the exit code."""
    print_text(f"error: {message}")
    return code


def print_text(text: str) -> None:
    RunConsole().print(text, soft_wrap=True)
