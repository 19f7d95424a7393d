"""The further machines of a service from its head's view: joined, about to leave, or lost."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.concurrency import cancel_tasks
from services.common.logged_child import LoggedChild
from services.common.python_command import python_command
from services.common.ray_cluster.cluster_settings import derive_cluster_token
from services.common.ray_cluster.machine_resources import ExpectedMachines

_PROGRAM = "services.common.ray_cluster.adapters.watch_program"
_ANSWER_S = 8.0


class MachinesLostError(Exception):
    """Machines have not joined, or their watcher has ended; the message gives the reason."""


class MachineWatch:
    """A child process that is connected to the cluster and reports on its machines."""

    def __init__(self, child: LoggedChild) -> None:
        self._child = child
        self._answers = asyncio.Queue[str]()
        self._turn = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[Sequence[str]] = loop.create_future()
        # The name of the first machine that has to leave, and why machines are lost.
        self._leaving: asyncio.Future[str] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._reader = asyncio.create_task(self._read_news())

    @staticmethod
    async def open_watch(
        address: str, token: str, expected: ExpectedMachines, log_path: Path
    ) -> "MachineWatch":
        """Connect to the cluster at `address` with the run's token, and wait for its machines.

        Raises MachinesLostError."""
        command = python_command("-m", _PROGRAM)
        watch = MachineWatch(await LoggedChild.start_child(command, log_path))
        plan = {
            "address": address,
            "token": derive_cluster_token(token),
            "expected": expected.to_message(),
        }
        try:
            watch._write_line(plan)
            await asyncio.shield(watch._joined)
        except BaseException:
            await watch.close()
            raise
        return watch

    @property
    def names(self) -> Sequence[str]:
        """Names of the machines, for messages."""
        return self._joined.result()

    @property
    def lost(self) -> str | None:
        """Reason why machines are lost; None while all are there."""
        return self._lost.result() if self._lost.done() else None

    async def wait_until_one_leaves(self) -> str:
        """Wait for a machine that has to leave; return its name."""
        return await asyncio.shield(self._leaving)

    async def wait_until_lost(self) -> str:
        """Wait until a machine is lost; return the reason."""
        return await asyncio.shield(self._lost)

    async def read_tails(self, pattern: str) -> str:
        """Return which machines do not answer, and the ends of logs on the others whose names match
        `pattern`, where `{number}` stands for the machine's number."""
        return await self._request({"tails": pattern})

    async def dismiss_machines(self) -> None:
        """Notify the machines that the service has ended in order, and will not come back."""
        await self._request({"dismiss": True})

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._child.kill()
        await self._child.wait_until_ended()
        await cancel_tasks([self._reader])

    async def _request(self, command: dict[str, Any]) -> str:
        """Return the answer; an empty text if none comes in time."""
        async with self._turn:
            if self._child.exit_code is not None:
                return ""
            self._write_line(command)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await self._answers.get()
            except TimeoutError:
                return ""

    def _write_line(self, message: dict[str, Any]) -> None:
        self._child.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_news(self) -> None:
        while line := await self._child.stdout.readline():
            self._take_news(json.loads(line))
        code, log = await self._child.wait_until_ended(), self._child.describe_log_end()
        self._lose(f"the watcher of the machines ended with code {code}; {log}")

    def _take_news(self, news: dict[str, Any]) -> None:
        if "joined" in news:
            self._joined.set_result(news["joined"])
        elif "leaving" in news and not self._leaving.done():
            self._leaving.set_result(news["leaving"])
        elif "lost" in news:
            self._lose(f"{news['lost']} is lost: it has ended or does not answer")
        elif "error" in news:
            self._lose(news["error"])
        elif "answer" in news:
            self._answers.put_nowait(news["answer"])

    def _lose(self, why: str) -> None:
        if not self._joined.done():
            self._joined.set_exception(MachinesLostError(why))
        if not self._lost.done():
            self._lost.set_result(why)
