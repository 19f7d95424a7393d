"""`flotilla inspect`: shows runs in a browser, down to the tokens of each episode."""

import asyncio
import socket
import subprocess
import webbrowser
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.process.run_child import run_child
from flotilla_launcher.cli.command_runner import (
    FAILED,
    OK,
    reports_errors,
    run_interruptible,
    with_run_source,
)
from flotilla_launcher.cli.far_run_files import SSH_VARIABLES, FarFiles, StoredFiles, find_files
from flotilla_launcher.cli.inspector_process import (
    INSPECTOR,
    InspectorError,
    ServedInspector,
    check_inspector_is_installed,
    inspector_by,
    served_inspector,
    serving_arguments,
)
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.restore import fetch_for_reading
from flotilla_launcher.cli.run_source import NEWEST, RunSource, find_local_run, find_run
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.security.launcher_address import address_from_environment
from flotilla_launcher.store.run_files import JOURNAL


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Options of the page server. `policy` is the tokenizer's model folder, if not the run's."""

    port: int = 0
    browse: bool = False
    policy: Path | None = None

    def to_arguments(self) -> list[str]:
        return [] if self.policy is None else [f"--policy={self.policy}"]


@reports_errors()
def inspect_runs(run_id: str | None, runs: Path, options: PageOptions) -> int:
    """Serve the pages of a run, or of all runs, until Ctrl-C."""
    if run_id is None and address_from_environment() is None:
        return _serve_here(runs, None, options)
    here = _find_here(run_id or NEWEST, runs)
    if here is not None:
        return _serve_here(runs, here.name, options)

    async def serve_elsewhere(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id or NEWEST))
        place = find_files(run, address_from_environment())
        if isinstance(place, FarFiles):
            return await _serve(_inspector_there(place, options), options, interrupts)
        async with _fetched(place, interrupts) as fetched:
            return await _serve(_inspector_here(fetched, run.run_id, options), options, interrupts)

    return with_run_source(runs, serve_elsewhere)


@reports_errors()
def write_bundle(
    run_id: str, runs: Path, out: Path, steps: Sequence[int], policy: Path | None
) -> int:
    """Write the pages of a run's steps to a zip file that needs no server."""
    arguments = [*(f"--step={step}" for step in steps), *PageOptions(policy=policy).to_arguments()]
    here = _find_here(run_id, runs)
    if here is not None:
        return _bundle_here(here, out, arguments)

    async def bundle_elsewhere(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id))
        place = find_files(run, address_from_environment())
        if isinstance(place, FarFiles):
            return await interrupts.unless_interrupted(_bundle_there(place, out, arguments))
        async with _fetched(place, interrupts) as fetched:
            return await asyncio.to_thread(_bundle_here, fetched / run.run_id, out, arguments)

    return with_run_source(runs, bundle_elsewhere)


def _find_here(run_id: str, runs: Path) -> Path | None:
    """Return the folder of a run whose files are on this machine. Raises NoRunError."""
    if run_id != NEWEST and (runs / run_id / JOURNAL).exists():
        return runs / run_id
    if address_from_environment() is not None:
        return None
    found = find_local_run(run_id, runs).run
    return runs / found.run_id if found.backend == "local" else None


def _serve_here(runs: Path, run_id: str | None, options: PageOptions) -> int:
    check_inspector_is_installed()
    return run_interruptible(
        lambda interrupts: _serve(_inspector_here(runs, run_id, options), options, interrupts)
    )


def _inspector_here(
    runs: Path, run_id: str | None, options: PageOptions
) -> AbstractAsyncContextManager[ServedInspector]:
    return served_inspector(runs, run_id, port=options.port, arguments=options.to_arguments())


def _bundle_here(run_dir: Path, out: Path, arguments: Sequence[str]) -> int:
    check_inspector_is_installed()
    where = ("--runs", str(run_dir.parent), "--run", run_dir.name, "--bundle", str(out.absolute()))
    command = python_command("-m", INSPECTOR, *where, *arguments)
    environ = child_environment(ours=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environ, check=False)
    return _report_bundle(out) if done.returncode == 0 else FAILED


def _report_bundle(out: Path) -> int:
    Terminal().print(f"{out}: unpack it, and open index.html", soft_wrap=True)
    return OK


@asynccontextmanager
async def _fetched(place: StoredFiles, interrupts: Interrupts) -> AsyncGenerator[Path]:
    """Yield a folder of runs with the files that readers need, fetched from the store. Raises
    ConfigError, before anything is fetched, if the inspector's packages are missing here."""
    check_inspector_is_installed()
    with TemporaryDirectory(prefix="flotilla-") as folder:
        fetching = fetch_for_reading(place.url, place.spec, Path(folder), Terminal())
        await interrupts.unless_interrupted(fetching)
        yield Path(folder)


@asynccontextmanager
async def _inspector_there(
    place: FarFiles, options: PageOptions
) -> AsyncGenerator[ServedInspector]:
    """Serve the pages on the machine that has the files, at the same port of this one."""
    port = options.port or _find_free_port()
    shell = place.program(INSPECTOR, *serving_arguments(port), *options.to_arguments())
    try:
        async with inspector_by(place.command(shell, port)) as served:
            yield served
    except InspectorError as error:
        raise InspectorError(f"{error}; or {place.advice}") from error


async def _bundle_there(place: FarFiles, out: Path, arguments: Sequence[str]) -> int:
    program = place.program(INSPECTOR, *arguments)
    shell = (
        f'd=$(mktemp -d) && {program} --bundle "$d/run.zip" > /dev/null && cat "$d/run.zip";'
        ' code=$?; rm -r "$d"; exit $code'
    )
    done = await run_child(place.command(shell), env=child_environment(*SSH_VARIABLES, ours=True))
    if done.code != 0:
        said = done.errors.decode(errors="replace").strip()
        raise InspectorError(f"{said}; or {place.advice}")
    await asyncio.to_thread(out.write_bytes, done.output)
    return _report_bundle(out)


async def _serve(
    serving: AbstractAsyncContextManager[ServedInspector],
    options: PageOptions,
    interrupts: Interrupts,
) -> int:
    async with AsyncExitStack() as stack:
        try:
            served = await interrupts.unless_interrupted(stack.enter_async_context(serving))
            Terminal().print(f"Open {served.url}\nCtrl-C stops the server.", soft_wrap=True)
            if options.browse:
                await asyncio.to_thread(webbrowser.open, served.url)
            why = await interrupts.unless_interrupted(served.wait_until_ended())
        except InterruptedByUserError:
            return OK
        raise InspectorError(why)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
