"""The run's folder on the machine of its learner: kept, restored from the store, or begun.

A run that has trained never starts over: its readers would take the first steps of another run for
its next ones."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.learner_programs import NOTHING_STORED, RESTORE, STORE_AWAY, learner_command
from flotilla_launcher.store.logs import read_last_lines
from flotilla_launcher.store.run_files import JOURNAL, describe_missing


class NotResumableError(Exception):
    """The run cannot be continued here; the message gives the reason and the fix."""


class StoreAwayError(Exception):
    """The store is out of reach at present."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Location of the run's folder and of its uploads.

    The `spec` and the variables that the program `inherits` give access to the uploads."""

    run_dir: Path
    url: str | None
    spec: Path
    log: Path
    inherits: tuple[str, ...] = ()

    async def ensure_ready(self, begun: bool) -> bool:
        """Restore the folder if it has to be; return whether it was restored.

        Raises NotResumableError, StoreAwayError."""
        if not self._must_be_restored(begun):
            return False
        try:
            code = await self._run_restore()
        except ConfigError as error:
            raise NotResumableError(f"{self._lost_text()}: {error}") from error
        if code == 0:
            return True
        if code == NOTHING_STORED and not begun:
            return False
        if code == STORE_AWAY:
            raise StoreAwayError(f"{self._lost_text()}: {self.url} is out of reach")
        raise NotResumableError(f"{self._lost_text()}: {read_last_lines(self.log, 3)}")

    def _must_be_restored(self, begun: bool) -> bool:
        if (self.run_dir / JOURNAL).exists():
            return False
        there = self.run_dir.exists()
        if there and (gone := describe_missing(self.run_dir.parent, self.run_dir.name)):
            raise NotResumableError(f"{self._lost_text()}: {gone}")
        if self.url is not None and (begun or not there):
            return True
        if begun:
            raise NotResumableError(
                f"{self._lost_text()}, and learner.checkpoint.remote names no store to fetch"
                " it from:"
                " resume it where its folder is, or begin a new run with a remote"
            )
        return False

    def _lost_text(self) -> str:
        return f"run {self.run_dir.name} has trained, but this machine has nothing of it"

    async def _run_restore(self) -> int:
        """Run the learner's own restore program, for the store is the learner's. Return its
        exit code."""
        runs, url = str(self.run_dir.parent), str(self.url)
        arguments = (url, "--config", str(self.spec), "--runs", runs)
        command = learner_command(RESTORE, *arguments)
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
