"""A run's folder on the machine of its learner: there, brought from the store, or begun.

A run that has trained never begins anew: whoever watches it would take the first steps of another
run for its next ones.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.common.child_environment import child_environment
from services.common.interpreter import python
from services.launcher.control.recover_from_folder import JOURNAL, what_is_gone
from services.launcher.state import Policy
from services.launcher.store.logs import last_lines

# Exit codes of `services.learner.checkpoints.restore_command`.
_RETRYABLE, _NOTHING = 3, 4


class NotResumableError(Exception):
    """The run cannot go on here; the message says why and what to do."""


class StoreAwayError(Exception):
    """The store could not be reached, time and again."""


class Way(StrEnum):
    """How a learner gets its folder."""

    GO_ON = "go on"
    RESTORE = "restore"
    BEGIN = "begin"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the folder is to be, and where its uploads are; `spec` says how to reach
    them, by what the program `inherits`."""

    run_dir: Path
    url: str | None
    spec: Path
    log: Path
    inherits: tuple[str, ...] = ()

    async def ready(
        self,
        begun: bool,
        policy: Policy,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Way:
        """Have it there. Raises NotResumableError, StoreAwayError."""
        way = self._way(begun)
        if way is not Way.RESTORE:
            return way
        for failures in range(1, policy.max_restarts + 2):
            code = await self._restore()
            if code == 0:
                return Way.RESTORE
            if code == _NOTHING and not begun:
                return Way.BEGIN
            if code != _RETRYABLE:
                raise NotResumableError(f"{self._lost()}: {last_lines(self.log, 3)}")
            await sleep(policy.backoff(failures))
        raise StoreAwayError(f"{self._lost()}: {self.url} is out of reach")

    def _way(self, begun: bool) -> Way:
        if (self.run_dir / JOURNAL).exists():
            return Way.GO_ON
        there = self.run_dir.exists()
        if there and (gone := what_is_gone(self.run_dir.parent, self.run_dir.name)):
            raise NotResumableError(f"{self._lost()}: {gone}")
        if self.url is not None and (begun or not there):
            return Way.RESTORE
        if begun:
            raise NotResumableError(
                f"{self._lost()}, and learner.checkpoint.remote names no store to fetch it from:"
                " resume it where its folder is, or begin a new run with a remote"
            )
        return Way.BEGIN

    def _lost(self) -> str:
        return f"run {self.run_dir.name} has trained, but this machine has nothing of it"

    async def _restore(self) -> int:
        """The exit code of the learner's own program: the store is the learner's."""
        runs, url = str(self.run_dir.parent), str(self.url)
        command = python(
            *(
                "-m",
                "services.learner.checkpoints.restore_command",
                url,
                "--config",
                str(self.spec),
                "--runs",
                runs,
            )
        )
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=child_environment(*self.inherits, ours=True),
            )
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
