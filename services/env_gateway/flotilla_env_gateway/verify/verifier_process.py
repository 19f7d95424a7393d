"""The gateway's side of a process that runs verifiers: start, requests, answers, kill."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla_common.process.child_environment import child_environment
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.large_values import dump_line_aside
from flotilla_env_gateway.ports import Verification
from flotilla_env_gateway.verify import cgroup
from flotilla_env_gateway.verify.protocol import (
    LINE_BYTES,
    MessageBudget,
    ProtocolError,
    VerifierDone,
    WorkerMessage,
    WorkerReady,
    parse_message,
)
from flotilla_env_gateway.verify.verifier_queries import RequestAnswerer

_LOG = get_logger(__name__)
_START_S = 30.0
_END_S = 5.0
_STDERR_BYTES = 4096


class StartError(Exception):
    """Failure of the process to become ready; the message has the reason, if known."""


class WorkerDiedError(Exception):
    """The process ended before the verifier did."""


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """Command line of a verifier process.

    Two words of `argv` are replaced by descriptors: the seccomp program `filter` is read
    from FILTER, and bubblewrap writes JSON about the first process in the sandbox to INFO.
    `group` is the control group that the process enters; it is removed with the process. It
    gets what a child may have of `environ`, and starts in `folder`."""

    argv: tuple[str, ...]
    filter: bytes = b""
    group: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str = "/"
    start_s: float = _START_S


FILTER, INFO = "{filter}", "{info}"


class VerifierProcess:
    """One running process for verifiers.

    `inside` is a descriptor of the first process in the sandbox, if there is a sandbox. All
    others there end with it, and then bubblewrap, which waits for it. If bubblewrap ended
    first, nothing might reap that process in a container without an init."""

    def __init__(self, process: asyncio.subprocess.Process, group: Path | None = None) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._group = group
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.inside: int | None = None
        self.jobs = 0
        # Set from the start of a verifier until it is done; if that never comes, the process cannot
        # be reused.
        self.busy = False

    @classmethod
    async def start_process(cls, command: ProcessCommand) -> "VerifierProcess":
        """Start the process; return once it is ready for a job. Raises StartError."""
        reader, writer = os.pipe()
        try:
            process = await _spawn_process(command, writer)
        except BaseException:
            os.close(reader)
            if command.group is not None:
                await cgroup.remove_group(command.group)
            raise
        finally:
            os.close(writer)
        worker = cls(process, command.group)
        try:
            async with asyncio.timeout(command.start_s):
                await worker._receive_ready()
            worker.inside = _open_first_process(reader) if INFO in command.argv else None
        except (WorkerDiedError, ProtocolError, TimeoutError) as error:
            await worker.kill()
            assert process.stderr is not None
            stderr_text = (
                (await process.stderr.read(_STDERR_BYTES)).decode("utf-8", "replace").strip()
            )
            raise StartError(
                stderr_text or str(error) or f"not ready after {command.start_s:g} s"
            ) from error
        except BaseException:
            await worker.kill()
            raise
        finally:
            os.close(reader)
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def run_verification(self, verification: Verification) -> VerifierDone:
        """Answer one verifier's requests until it is done. Raises WorkerDiedError and
        ProtocolError, and BackendError if the environment fails to answer, which is not the
        verifier's fault."""
        self.jobs += 1
        self.busy = True
        await self._send_message(
            {
                "source": verification.source,
                "function": verification.function,
                "arguments": verification.arguments,
            }
        )
        budget, answerer = MessageBudget(), RequestAnswerer(verification)
        while True:
            message = await self._receive_message(budget)
            if isinstance(message, VerifierDone):
                self.busy = False
                return message
            await self._send_message(await answerer.answer_to(message))

    async def kill(self) -> None:
        """Kill the process; return once it and every other holder of its output are gone."""
        with suppress(ProcessLookupError):
            if self.inside is not None:
                signal.pidfd_send_signal(self.inside, signal.SIGKILL)
                os.close(self.inside)
                self.inside = None
            elif self.is_alive:
                # With what it has started.
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                # Read to the end: unread data would hide the end of the stream.
                while await self._stdout.read(LINE_BYTES):
                    continue
                await self._process.wait()
        except TimeoutError:
            _LOG.error("verifier_process_lives_on", pid=self._process.pid)
        if self._group is not None:
            await cgroup.remove_group(self._group)

    async def _receive_ready(self) -> None:
        if await self._receive_message(MessageBudget()) != WorkerReady():
            raise ProtocolError("the process wrote something else than that it is ready")

    async def _send_message(self, message: Any) -> None:
        """Send one message. Waits while the process does not read, so that it cannot fill the
        gateway's memory."""
        try:
            self._stdin.write(await dump_line_aside(message))
            await self._stdin.drain()
        except ConnectionError as error:
            raise WorkerDiedError("the verifier's process ended") from error

    async def _receive_message(self, budget: MessageBudget) -> WorkerMessage:
        try:
            line = await self._stdout.readline()
        except ValueError as error:
            raise ProtocolError(f"the verifier wrote a line above {LINE_BYTES} bytes") from error
        except ConnectionError as error:
            raise WorkerDiedError("the verifier's process ended") from error
        if not line:
            raise WorkerDiedError("the verifier's process ended")
        budget.count_line(line)
        return await run_aside(len(line), lambda: parse_message(line))


async def _spawn_process(command: ProcessCommand, info: int) -> asyncio.subprocess.Process:
    """Spawn the process; bubblewrap's own environment, which would show in /proc, is empty."""
    content = _readable_descriptor(command.filter)
    words = {FILTER: str(content), INFO: str(info)}
    try:
        return await asyncio.create_subprocess_exec(
            *(words.get(arg, arg) for arg in command.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=command.folder,
            env=child_environment(ours=True, environ=command.environ),
            limit=LINE_BYTES,
            pass_fds=[int(number) for word, number in words.items() if word in command.argv],
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{command.argv[0]} cannot be started: {error}") from error
    finally:
        os.close(content)


def _open_first_process(reader: int) -> int:
    """Open a descriptor of the sandbox's first process; bubblewrap reports its number before
    it starts the worker."""
    return os.pidfd_open(json.loads(os.read(reader, 4096))["child-pid"])


def _readable_descriptor(content: bytes) -> int:
    """Open a descriptor to read `content` from; it fits into a pipe's buffer."""
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
    finally:
        os.close(writer)
    return reader
