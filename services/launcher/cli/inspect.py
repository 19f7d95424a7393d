"""`flotilla inspect`: shows runs in a browser, down to the tokens of each episode."""

import asyncio
import subprocess
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.aio.concurrency import running_tasks
from services.common.process.child_environment import child_environment
from services.common.process.python_command import python_command
from services.launcher.cli.command_runner import (
    FAILED,
    OK,
    reports_errors,
    run_interruptible,
    with_run_source,
)
from services.launcher.cli.inspector_process import (
    INSPECTOR,
    InspectorError,
    check_inspector_is_installed,
    served_inspector,
)
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.run_mirror import RunMirror, mirrored_run
from services.launcher.cli.run_source import NEWEST, RunSource, find_run, find_run_dir
from services.launcher.cli.terminal import Terminal
from services.launcher.security.launcher_address import address_from_environment
from services.launcher.store.run_files import JOURNAL


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
    check_inspector_is_installed()
    if _is_elsewhere(run_id, runs):
        return with_run_source(
            runs, lambda known, interrupts: _serve_mirror(known, interrupts, run_id, options)
        )
    found = None if run_id is None else find_run_dir(run_id, runs).name
    return run_interruptible(lambda interrupts: _serve_pages(found, runs, options, interrupts))


@reports_errors()
def write_bundle(
    run_id: str, runs: Path, out: Path, steps: Sequence[int], policy: Path | None
) -> int:
    """Write the pages of a run's steps to a zip file that needs no server."""
    arguments = ["--bundle", str(out.absolute()), *(f"--step={step}" for step in steps)]
    arguments += PageOptions(policy=policy).to_arguments()

    async def bundle_mirror(known: RunSource, interrupts: Interrupts) -> int:
        async with known.open_launcher() as connection:
            run = await interrupts.unless_interrupted(find_run(known, run_id))
            with mirrored_run(connection, run.run_id) as mirror:
                await interrupts.unless_interrupted(mirror.refresh())
                return await asyncio.to_thread(_bundle, mirror.folder, out, arguments)

    check_inspector_is_installed()
    if _is_elsewhere(run_id, runs):
        return with_run_source(runs, bundle_mirror)
    return _bundle(find_run_dir(run_id, runs), out, arguments)


def _is_elsewhere(run_id: str | None, runs: Path) -> bool:
    """Return whether FLOTILLA_LAUNCHER names a launcher and the run is not in this folder."""
    here = run_id not in (None, NEWEST) and (runs / str(run_id) / JOURNAL).exists()
    return not here and address_from_environment() is not None


def _bundle(run_dir: Path, out: Path, arguments: Sequence[str]) -> int:
    done = subprocess.run(
        python_command(
            *("-m", INSPECTOR, "--runs", str(run_dir.parent), "--run", run_dir.name, *arguments)
        ),
        stdout=subprocess.DEVNULL,
        env=child_environment(ours=True),
    )
    if done.returncode == 0:
        Terminal().print(f"{out}: unpack it, and open index.html", soft_wrap=True)
    return OK if done.returncode == 0 else FAILED


async def _serve_mirror(
    known: RunSource, interrupts: Interrupts, run_id: str | None, options: PageOptions
) -> int:
    """Serve the pages of a remote launcher's run; without `run_id`, of the newest."""
    async with known.open_launcher() as connection:
        run = await interrupts.unless_interrupted(find_run(known, run_id or NEWEST))
        with mirrored_run(connection, run.run_id) as mirror:
            where = connection.address.address
            text = f"Fetching run {run.run_id} from the launcher at {where}"
            Terminal().print(text, style="dim", soft_wrap=True)
            running = await interrupts.unless_interrupted(mirror.refresh())
            async with running_tasks(*([_follow(mirror)] if running else ())):
                return await _serve_pages(mirror.folder.name, mirror.runs, options, interrupts)


async def _follow(mirror: RunMirror) -> None:
    def report(trouble: str) -> None:
        text = f"Cannot refresh the pages for now: {trouble}"
        Terminal().print(text, style="dim", soft_wrap=True)

    await mirror.follow(report)


async def _serve_pages(
    run_id: str | None, runs: Path, options: PageOptions, interrupts: Interrupts
) -> int:
    arguments = options.to_arguments()
    async with served_inspector(runs, run_id, port=options.port, arguments=arguments) as served:
        Terminal().print(f"Open {served.url}\nCtrl-C stops the server.", soft_wrap=True)
        if options.browse:
            await asyncio.to_thread(webbrowser.open, served.url)
        try:
            why = await interrupts.unless_interrupted(served.wait_until_ended())
        except InterruptedByUserError:
            return OK
    raise InspectorError(why)
