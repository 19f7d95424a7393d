"""`flotilla inspect`: shows runs in a browser, down to the tokens of each episode."""

import asyncio
import subprocess
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from services.common.child_environment import child_environment
from services.common.errors import ConfigError
from services.common.python_command import python_command
from services.launcher.cli.command_runner import FAILED, OK, report_error
from services.launcher.cli.inspector_process import (
    INSPECTOR,
    InspectorError,
    check_inspector_is_installed,
    served_inspector,
)
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.run_source import NoRunError, find_run_dir
from services.launcher.cli.terminal import Terminal


def inspect_runs(run_id: str | None, runs: Path, *, port: int, browse: bool) -> int:
    """Serve the pages of a run, or of all runs, until Ctrl-C; with `browse`, open a browser."""
    try:
        check_inspector_is_installed()
        found = None if run_id is None else find_run_dir(run_id, runs).name
        return asyncio.run(_serve_pages(found, runs, port, browse=browse))
    except (ConfigError, NoRunError, InspectorError) as error:
        return report_error(str(error))


def write_bundle(run_id: str, runs: Path, out: Path, steps: Sequence[int]) -> int:
    """Write the pages of a run's steps to a zip file that needs no server."""
    try:
        check_inspector_is_installed()
        run_dir = find_run_dir(run_id, runs)
    except (ConfigError, NoRunError) as error:
        return report_error(str(error))
    chosen = [f"--step={step}" for step in steps]
    arguments = ("--runs", str(runs), "--run", run_dir.name, "--bundle", str(out), *chosen)
    done = subprocess.run(
        python_command("-m", INSPECTOR, *arguments),
        stdout=subprocess.DEVNULL,
        env=child_environment(ours=True),
    )
    if done.returncode == 0:
        Terminal().print(f"{out}: unpack it, and open index.html", soft_wrap=True)
    return OK if done.returncode == 0 else FAILED


async def _serve_pages(run_id: str | None, runs: Path, port: int, *, browse: bool) -> int:
    interrupts = Interrupts()
    with interrupts.catch_signals():
        async with served_inspector(runs, run_id, port=port) as served:
            Terminal().print(f"Open {served.url}\nCtrl-C stops the server.", soft_wrap=True)
            if browse:
                await asyncio.to_thread(webbrowser.open, served.url)
            try:
                why = await interrupts.unless_interrupted(served.wait_until_ended())
            except InterruptedByUserError:
                return OK
    raise InspectorError(why)
