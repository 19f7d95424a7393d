"""The further machines of a service, as its head sees them: joined, about to leave, or lost."""

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
    """Machines have not joined, or nobody watches them any more; the message says why."""


class MachineWatch:
    """A child process that is connected to the cluster, and tells of its machines."""

    def __init__(self, child: LoggedChild) -> None:
        self._child = child
        self._answers = asyncio.Queue[str]()
        self._turn = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[Sequence[str]] = loop.create_future()
        # The name of the first machine that has to go, and why the machines are not whole.
        self._leaving: asyncio.Future[str] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._reader = asyncio.create_task(self._read_news())

    @staticmethod
    async def open_watch(
        address: str, token: str, expected: ExpectedMachines, log_path: Path
    ) -> "MachineWatch":
        """Connect to the cluster at `address` by the run's token, and wait for its machines.

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
        """The names of the machines, for messages."""
        return self._joined.result()

    @property
    def lost(self) -> str | None:
        """The reason why the machines are not whole any more; None while they are."""
        return self._lost.result() if self._lost.done() else None

    async def wait_until_one_leaves(self) -> str:
        """Return the name of the first machine that has to go."""
        return await asyncio.shield(self._leaving)

    async def wait_until_lost(self) -> str:
        """Return the reason, once a machine is lost."""
        return await asyncio.shield(self._lost)

    async def read_tails(self, pattern: str) -> str:
        """Return which machines do not answer, and the ends of the logs on the others whose names
        match `pattern`; in it `{number}` stands for that of the machine."""
        return await self._ask({"tails": pattern})

    async def dismiss_machines(self) -> None:
        """Tell the machines that the service has ended in order, and will not come back."""
        await self._ask({"dismiss": True})

    async def close(self) -> None:
        """End the process. May be called again."""
        self._child.kill()
        await self._child.wait_until_ended()
        await cancel_tasks([self._reader])

    async def _ask(self, command: dict[str, Any]) -> str:
        """Return the answer; nothing where none comes in time."""
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
            self._lose(f"{news['lost']} is lost: it has ended, or does not answer")
        elif "error" in news:
            self._lose(news["error"])
        elif "answer" in news:
            self._answers.put_nowait(news["answer"])

    def _lose(self, why: str) -> None:
        if not self._joined.done():
            self._joined.set_exception(MachinesLostError(why))
        if not self._lost.done():
            self._lost.set_result(why)
