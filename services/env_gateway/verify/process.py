"""One process that runs verifiers, seen from the gateway: started, asked, answered, killed."""

import asyncio
import base64
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.large_values import aside_of, dump_json_aside
from services.common.log import get_logger
from services.common.parsing import aside
from services.env_gateway.ports import QueryError, Rows, Text, Verification
from services.env_gateway.verify import cgroup
from services.env_gateway.verify.protocol import (
    LINE_BYTES,
    Budget,
    Call,
    Done,
    Message,
    ProtocolError,
    Query,
    Ready,
    Snapshot,
    parse,
)

_LOG = get_logger(__name__)
_START_S = 30.0
_END_S = 5.0
_STDERR_BYTES = 4096
_ANSWER_CHARS = 2**20


class StartError(Exception):
    """The process did not become ready; the message says why, as far as it told."""


class WorkerDiedError(Exception):
    """The process ended before the verifier did."""


@dataclass(frozen=True, slots=True)
class Command:
    """Two words of `argv` are replaced by descriptors: from FILTER the seccomp program `filter` is
    read, and to INFO goes bubblewrap's JSON about the first process in the sandbox. `group` is the
    control group that it enters, and which ends with it."""

    argv: tuple[str, ...]
    filter: bytes = b""
    group: Path | None = None


FILTER, INFO = "{filter}", "{info}"


class WorkerProcess:
    """`inside` is a descriptor of the first process in the sandbox, where there is one. All others
    there end with it, and then bubblewrap, which has waited for it; whereas were bubblewrap to end
    first, nobody might wait for it in a container without an init."""

    def __init__(self, process: asyncio.subprocess.Process, group: Path | None = None) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._group = group
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.inside: int | None = None
        self.jobs = 0
        # From the start of a verifier until it is done; not usable again if that never comes.
        self.busy = False

    @classmethod
    async def start(cls, command: Command) -> "WorkerProcess":
        """Returns once the process can take a job. Raises StartError."""
        reader, writer = os.pipe()
        try:
            process = await _spawn(command, writer)
        except BaseException:
            os.close(reader)
            if command.group is not None:
                await cgroup.remove(command.group)
            raise
        finally:
            os.close(writer)
        worker = cls(process, command.group)
        try:
            async with asyncio.timeout(_START_S):
                await worker._hear_ready()
            worker.inside = _first_process(reader) if INFO in command.argv else None
        except (WorkerDiedError, ProtocolError, TimeoutError) as error:
            await worker.kill()
            assert process.stderr is not None
            told = (await process.stderr.read(_STDERR_BYTES)).decode("utf-8", "replace").strip()
            raise StartError(told or str(error) or f"not ready after {_START_S} s") from error
        except BaseException:
            await worker.kill()
            raise
        finally:
            os.close(reader)
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def run(self, verification: Verification) -> Done:
        """Serve one verifier's questions until it is done. Raises WorkerDiedError, ProtocolError,
        and BackendError when the environment fails to answer: not the verifier's fault."""
        self.jobs += 1
        self.busy = True
        await self._send(
            {
                "source": verification.source,
                "function": verification.function,
                "arguments": verification.arguments,
            }
        )
        budget, answers = Budget(), _Answers(verification)
        while True:
            message = await self._receive(budget)
            if isinstance(message, Done):
                self.busy = False
                return message
            await self._send(await answers.to(message))

    async def kill(self) -> None:
        """Returns when the process is gone, and with it every other that holds its output."""
        with suppress(ProcessLookupError):
            if self.inside is not None:
                signal.pidfd_send_signal(self.inside, signal.SIGKILL)
                os.close(self.inside)
                self.inside = None
            elif self.alive:
                self._process.kill()
        self._stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                # Read to the end: what is left unread would hide that the end has come.
                while await self._stdout.read(LINE_BYTES):
                    continue
                await self._process.wait()
        except TimeoutError:
            _LOG.error("verifier_process_lives_on", pid=self._process.pid)
        if self._group is not None:
            await cgroup.remove(self._group)

    async def _hear_ready(self) -> None:
        if await self._receive(Budget()) != Ready():
            raise ProtocolError("the process wrote something else than that it is ready")

    async def _send(self, message: Any) -> None:
        """Waits while the process does not read, so that it cannot fill this one's memory."""
        try:
            self._stdin.write(await dump_json_aside(message) + b"\n")
            await self._stdin.drain()
        except ConnectionError as error:
            raise WorkerDiedError("the verifier's process ended") from error

    async def _receive(self, budget: Budget) -> Message:
        try:
            line = await self._stdout.readline()
        except ValueError as error:
            raise ProtocolError(f"the verifier wrote a line above {LINE_BYTES} bytes") from error
        except ConnectionError as error:
            raise WorkerDiedError("the verifier's process ended") from error
        if not line:
            raise WorkerDiedError("the verifier's process ended")
        budget.spend(line)
        return await aside(len(line), lambda: parse(line))


async def _spawn(command: Command, info: int) -> asyncio.subprocess.Process:
    """The environment is empty; bubblewrap's own would show in /proc."""
    content = _readable(command.filter)
    words = {FILTER: str(content), INFO: str(info)}
    try:
        return await asyncio.create_subprocess_exec(
            *(words.get(arg, arg) for arg in command.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={},
            limit=LINE_BYTES,
            pass_fds=[int(number) for word, number in words.items() if word in command.argv],
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{command.argv[0]} cannot be started: {error}") from error
    finally:
        os.close(content)


def _first_process(reader: int) -> int:
    """Bubblewrap tells its number before it starts the worker."""
    return os.pidfd_open(json.loads(os.read(reader, 4096))["child-pid"])


def _readable(content: bytes) -> int:
    """A descriptor to read `content` from; it fits into a pipe's buffer."""
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
    finally:
        os.close(writer)
    return reader


class _Answers:
    """Answers to one verifier's questions. A database of which it has a copy is not asked: what
    the copy answers concerns only the process that holds it. Nor is it copied twice, which costs
    the environment and this process more than the question does the verifier."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._copied: set[str] = set()
        self._asked: set[str] = set()

    async def to(self, message: Message) -> Any:
        match message:
            case Snapshot(db) if db not in self._copied:
                self._copied.add(db)
                content = await self._verification.snapshot(db)
                if content is None:
                    self._asked.add(db)
                    return None
                return await aside(len(content), lambda: base64.b64encode(content).decode())
            case Query(db, sql, args) if db in self._asked:
                return await self._rows(db, sql, args)
            case Call(name, arguments):
                return await self._called(name, arguments)
            case _:
                raise ProtocolError("the verifier's process asked what it had no reason to")

    async def _called(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._verification.call is None:
            return {"error": "there are no tools to call"}
        try:
            result = await self._verification.call(name, arguments)
        except QueryError as error:
            return {"error": str(error)}
        text = "\n".join(part.text for part in result.parts if isinstance(part, Text))
        return {"error" if result.is_error else "text": text[:_ANSWER_CHARS]}

    async def _rows(self, db: str, sql: str, args: Sequence[Any]) -> Any:
        try:
            rows = await self._verification.query(db, sql, args)
        except QueryError as error:
            return {"error": str(error)}
        return await aside_of(rows.rows, lambda: _told(rows))


def _told(rows: Rows) -> dict[str, Any]:
    return {"columns": rows.columns, "rows": [[_plain(v) for v in row] for row in rows.rows]}


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
