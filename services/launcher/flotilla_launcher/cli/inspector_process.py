"""The run inspector as a child of a command, here or where `ssh` reaches the run's files."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.extras import install_command
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.cli.far_run_files import SSH_VARIABLES
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.store.run_files import JOURNAL

INSPECTOR = "flotilla_reading.inspector"
# Packages of the extra `inspect` that the server needs.
_PACKAGES = ("starlette", "uvicorn", "jinja2")
_LOG = "inspector.log"
_END_S = 10.0
_POLL_S = 0.5


class InspectorError(CommandError):
    """Raised when the inspector does not serve; the message has the end of its log."""


def check_inspector_is_installed() -> None:
    """Raise ConfigError if the inspector's packages are missing."""
    if not is_inspector_installed():
        raise ConfigError(
            f"the inspector needs {', '.join(_PACKAGES)}; {install_command('inspect')}"
        )


def is_inspector_installed() -> bool:
    """Return whether all of the inspector's packages are installed."""
    return all(find_spec(name) is not None for name in _PACKAGES)


def serving_arguments(port: int) -> tuple[str, ...]:
    """Return the arguments of an inspector that serves until its stdin ends; 0 is any port."""
    return ("--listen", f"127.0.0.1:{port}", "--end-with-stdin")


@asynccontextmanager
async def served_inspector(
    runs: Path, run_id: str | None, *, port: int = 0, arguments: Sequence[str] = ()
) -> "AsyncGenerator[ServedInspector]":
    """Serve the pages of `runs` until the block ends. Raises InspectorError."""
    shown = () if run_id is None else ("--run", run_id)
    where = ("--runs", str(runs), *shown, *serving_arguments(port))
    command = python_command("-m", INSPECTOR, *where, *arguments)
    async with inspector_by(command, runs / _LOG) as served:
        yield served


@asynccontextmanager
async def inspector_by(
    command: Sequence[str], log: Path | None = None
) -> "AsyncGenerator[ServedInspector]":
    """Run a command that serves the inspector's pages until the block ends. Without a `log` it
    writes to the user's terminal. Raises InspectorError."""
    child = await LineChannel.start_child("the inspector", command, log, *SSH_VARIABLES)
    try:
        line = await child.read_line()
        yield ServedInspector(child, json.loads(line)["url"])
    except ChildLostError as error:
        raise InspectorError(f"the inspector did not start: {error}") from error
    finally:
        await child.close(_END_S)


@asynccontextmanager
async def linked_inspector(runs: Path, run_id: str, console: Terminal) -> AsyncGenerator[None]:
    """Serve the pages of a run while the block runs, and print their address once they are served.

    Do nothing if the output is no terminal, or without the inspector's packages. A run never waits
    for the inspector, nor fails because of it."""
    if not console.is_terminal or not is_inspector_installed():
        yield
        return
    serving = asyncio.create_task(_serve_link(runs, run_id, console))
    try:
        yield
    finally:
        await cancel_tasks([serving])


async def _serve_link(runs: Path, run_id: str, console: Terminal) -> None:
    # A learner may start late, and one on a rented machine never has a journal here.
    while not (runs / run_id / JOURNAL).exists():  # noqa: ASYNC110 (another process)
        await asyncio.sleep(_POLL_S)
    try:
        async with served_inspector(runs, run_id) as served:
            console.print(f"Look inside: {served.url}", soft_wrap=True)
            why = await served.wait_until_ended()
    except (InspectorError, OSError) as error:
        why = str(error)
    console.print(f"The run continues without its pages: {why}", style="dim", soft_wrap=True)


class ServedInspector:
    """Running inspector at `url`, which includes its token."""

    def __init__(self, child: LineChannel, url: str) -> None:
        self._child = child
        self.url = url

    async def wait_until_ended(self) -> str:
        """Wait until the inspector ends on its own; return the reason."""
        return await self._child.wait_until_lost()
