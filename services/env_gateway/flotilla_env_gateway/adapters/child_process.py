"""Child processes that end together with all that they have started."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command, tied_command
from flotilla_common.process.spec_commands import resolve_command
from flotilla_common.telemetry.log import get_logger
from flotilla_env_gateway.adapters import process_namespace
from flotilla_env_gateway.adapters.stderr_tail import StderrTail

_LOG = get_logger(__name__)
_REAPER = Path(__file__).with_name("process_reaper.py")
_LINE_BYTES = 2**16
_START_S, _GRACE_S, _KILLED_S = 10.0, 3.0, 10.0


class ChildProcess:
    """A running command and all that it has started, in whatever session: all of it ends with the
    command, on `close`, and with the gateway, even if that is killed.

    With bubblewrap they are in a process namespace, which the kernel ends as a whole, and the
    command cannot gain rights (sudo). Elsewhere their ancestor process_reaper.py kills them."""

    def __init__(
        self, process: asyncio.subprocess.Process, command: Sequence[str], *, reaper: bool = False
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self.stdin = process.stdin
        self.stdout = process.stdout
        self._stderr = StderrTail(process, command[0])
        # The namespace's first process, and a descriptor of it; or `process` is a reaper.
        self._first: tuple[int, int] | None = None
        self._reaper = reaper
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        limit: int = _LINE_BYTES,
        folder: Path | None = None,
        mounts: Sequence[tuple[Path, Path]] = (),
    ) -> "ChildProcess":
        """Start a command that writes lines of at most `limit` bytes, with `environment` in
        addition to that of any child. Its working directory is `folder`, by default ours, seen
        with `mounts`, each a folder and its path there, which need bubblewrap. `python` and
        `flotilla` are our own, as in `resolve_command`. Raises OSError."""
        command = resolve_command(command)
        starting = asyncio.create_task(cls._start(command, environment, limit, folder, mounts))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would kill the process itself: what a reaper or bubblewrap has started by then
            # would outlive it.
            with suppress(OSError):
                await (await starting).close()
            raise

    @classmethod
    async def _start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        limit: int,
        folder: Path | None,
        mounts: Sequence[tuple[Path, Path]],
    ) -> "ChildProcess":
        bwrap = await asyncio.to_thread(process_namespace.find_bubblewrap)
        if bwrap is not None:
            return await cls._start_in_namespace(bwrap, command, environment, limit, folder, mounts)
        words = python_command("-I", "-S", str(_REAPER), str(os.getpid()), *command)
        return cls(await _spawn(words, environment, limit, folder), command, reaper=True)

    @classmethod
    async def _start_in_namespace(
        cls,
        bwrap: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        limit: int,
        folder: Path | None,
        mounts: Sequence[tuple[Path, Path]],
    ) -> "ChildProcess":
        reader, writer = os.pipe()
        try:
            words = process_namespace.command_in_namespace(
                bwrap, command, info=writer, folder=folder, mounts=mounts
            )
            tied = tied_command(signal.SIGKILL, *words)
            try:
                process = await _spawn(tied, environment, limit, pass_fds=(writer,))
            finally:
                os.close(writer)
            child = cls(process, command)
            try:
                child._first = await _open_first_process(reader)
            except BaseException:
                await child.close()
                raise
        finally:
            os.close(reader)
        return child

    @property
    def pid(self) -> int:
        """The process that ends, and is killed, with the command; it has the same environment."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def describe_end(self) -> str:
        """Describe how the command ended, with the last line of its standard error."""
        return await self._stderr.describe_end()

    def kill(self) -> None:
        """Kill everything, without waiting for its end. Idempotent."""
        with suppress(ProcessLookupError):
            if self._reaper:
                self._process.send_signal(signal.SIGHUP)
                self._process.send_signal(signal.SIGCONT)
            elif self._first is not None:
                signal.pidfd_send_signal(self._first[1], signal.SIGKILL)
            else:
                self._process.kill()

    async def close(self) -> None:
        """End the command and then everything else; return once nothing of it runs. Goes on if the
        caller is cancelled. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self.stdin.close()
        # The end of a pipe is only seen once it is read.
        draining = asyncio.create_task(self._drain_output())
        self._terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        self.kill()
        try:
            async with asyncio.timeout(_KILLED_S):
                await self._process.wait()
                await self._wait_for_first()
        except TimeoutError:
            _LOG.error("child_process_lives_on", pid=self.pid)
        draining.cancel()
        await asyncio.wait({draining})
        await self._stderr.close()

    def _terminate(self) -> None:
        """Ask the command's process group to end."""
        with suppress(ProcessLookupError):
            if self._first is not None:
                pid, descriptor = self._first
                # The pid of a process that is gone may be another one's.
                signal.pidfd_send_signal(descriptor, 0)
                os.killpg(pid, signal.SIGTERM)
            elif self.returncode is None:
                os.killpg(self.pid, signal.SIGTERM)

    async def _wait_for_first(self) -> None:
        """Wait for the first process, which ends as the last one of its namespace."""
        if self._first is None:
            return
        first, self._first = self._first[1], None
        try:
            await _wait_until_readable(first)
        finally:
            os.close(first)

    async def _drain_output(self) -> None:
        # Raised if somebody still reads, to the same end.
        with suppress(RuntimeError):
            while await self.stdout.read(_LINE_BYTES):
                continue


async def _spawn(
    words: Sequence[str],
    environment: Mapping[str, str],
    limit: int,
    folder: Path | None = None,
    *,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=limit,
        cwd=folder,
        pass_fds=pass_fds,
        env={**child_environment(), **environment},
    )


async def _open_first_process(reader: int) -> tuple[int, int] | None:
    """Return the pid and a descriptor of a namespace's first process, as bubblewrap reports it;
    None if it has ended already. Raises TimeoutError."""
    report = b""
    async with asyncio.timeout(_START_S):
        await _wait_until_readable(reader)
        while piece := os.read(reader, 4096):
            report += piece
            await _wait_until_readable(reader)
    if not report:
        return None
    pid = json.loads(report)["child-pid"]
    try:
        return pid, os.pidfd_open(pid)
    except ProcessLookupError:
        return None


async def _wait_until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
