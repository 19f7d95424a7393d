"""The further machines of a service from its head's view: joined, about to leave, or lost."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.ray_cluster.cluster_settings import derive_cluster_token
from flotilla_common.ray_cluster.machine_resources import ExpectedMachines

_PROGRAM = "flotilla_common.ray_cluster.adapters.watch_program"
_ANSWER_S = 8.0


class MachinesLostError(Exception):
    """Machines have not joined, or their watcher has ended; the message gives the reason."""


class MachineWatch:
    """A child process that is connected to the cluster and reports on its machines."""

    def __init__(self, child: LineChannel, names: Sequence[str]) -> None:
        self._child = child
        # Names of the machines, for messages.
        self.names = names
        self._answers = asyncio.Queue[str]()
        self._turn = asyncio.Lock()
        loop = asyncio.get_running_loop()
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
        child = await LineChannel.start_child("the watcher of the machines", command, log_path)
        plan = {
            "address": address,
            "token": derive_cluster_token(token),
            "expected": expected.to_message(),
        }
        try:
            news = await child.ask(plan)
        except BaseException as error:
            await child.close()
            if isinstance(error, ChildLostError):
                raise MachinesLostError(str(error)) from error
            raise
        if "error" in news:
            await child.close()
            raise MachinesLostError(news["error"])
        return MachineWatch(child, news["joined"])

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
        await self._child.close()
        await cancel_tasks([self._reader])

    async def _request(self, command: dict[str, Any]) -> str:
        """Return the answer; an empty text if none comes in time."""
        async with self._turn:
            if self._child.exit_code is not None:
                return ""
            self._child.send(command)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    return await self._answers.get()
            except TimeoutError:
                return ""

    async def _read_news(self) -> None:
        try:
            while True:
                self._take_news(json.loads(await self._child.read_line()))
        except ChildLostError as error:
            self._lose(str(error))

    def _take_news(self, news: dict[str, Any]) -> None:
        if "leaving" in news and not self._leaving.done():
            self._leaving.set_result(news["leaving"])
        elif "lost" in news:
            self._lose(f"{news['lost']} is lost: it has ended or does not answer")
        elif "answer" in news:
            self._answers.put_nowait(news["answer"])

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)
