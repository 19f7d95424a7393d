"""Watcher of a cluster's machines: `python -m services.common.ray_cluster.adapters.watch_program`.

Not for use by hand: `machine_watch.py` starts it, and both speak in lines of JSON. It waits for the
machines, then says when one has to go or is lost. It ends with stdin."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from services.common.printable_text import json_line, say
from services.common.ray_cluster.machine_resources import ExpectedMachines, machine_resource

# Machines have one of it, of which each actor takes so much.
_SHARE = 0.001
_ANSWER_S = 3.0


class MachineWatcher:
    """An actor on each further machine, for as long as this process lives."""

    def __init__(self, news: TextIO) -> None:
        """Watch no machine yet; what is to be told goes to `news`."""
        self._news = news
        self._actors: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def tell(self, message: Mapping[str, Any]) -> None:
        """Tell the service."""
        say(json_line(message), file=self._news)

    async def join_machines(self, expected: ExpectedMachines) -> None:
        """Wait for the machines and say their names. Raises MachinesMissingError."""
        import ray

        from services.common.ray_cluster.adapters.joined_machines import wait_for_machines
        from services.common.ray_cluster.adapters.node_actor import NodeActor

        remote: Any = ray.remote(NodeActor)
        for number in await wait_for_machines(expected):
            placed = remote.options(
                num_cpus=0, max_restarts=0, resources={machine_resource(number): _SHARE}
            )
            self._actors[number] = placed.remote()
        joins = (actor.join_service.remote() for actor in self._actors.values())
        for number, host in zip(self._actors, await asyncio.gather(*joins), strict=True):
            self._names[number] = f"machine {number} ({host})"
        self.tell({"joined": list(self._names.values())})

    async def watch_machines(self) -> None:
        """Say when machines have to go and when they are lost; return when all are."""
        numbers = self._actors
        await asyncio.gather(
            *(self._watch_leaving(number) for number in numbers),
            *(self._watch_loss(number) for number in numbers),
        )

    async def _watch_leaving(self, number: int) -> None:
        from ray.exceptions import RayActorError

        # Of one that is lost, the other watch tells.
        with suppress(RayActorError):
            await self._actors[number].wait_until_leaving.remote()
            self.tell({"leaving": self._names[number]})

    async def _watch_loss(self, number: int) -> None:
        from ray.exceptions import RayActorError

        try:
            await self._actors[number].stay.remote()
        except RayActorError:
            self.tell({"lost": self._names[number]})

    async def answer_command(self, command: Mapping[str, Any]) -> None:
        """Carry out one line of stdin, and say the answer."""
        if "tails" in command:
            pattern: str = command["tails"]
            said = await self._call_all(
                lambda actor, number: actor.read_tails.remote(pattern.format(number=number))
            )
            silent = (f"{self._names[each]} does not answer" for each in self._names.keys() - said)
            self.tell({"answer": "\n".join((*silent, *filter(None, said.values())))})
        else:
            await self._call_all(lambda actor, _: actor.dismiss_node.remote())
            self.tell({"answer": ""})

    async def _call_all(self, call: Callable[[Any, int], Any]) -> Mapping[int, str]:
        """Return the answers by machine; of those that give none in time there is none."""
        asked = {
            number: asyncio.ensure_future(call(actor, number))
            for number, actor in self._actors.items()
        }
        await asyncio.wait(asked.values(), timeout=_ANSWER_S)
        return {
            number: task.result()
            for number, task in asked.items()
            if task.done() and not task.exception()
        }


async def watch_cluster(plan: Mapping[str, Any], news: TextIO) -> None:
    """Watch the machines of the cluster that the first line describes."""
    # Read as Ray is imported.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": plan["token"]}
    import ray

    from services.common.ray_cluster.adapters.joined_machines import MachinesMissingError

    ray.init(plan["address"], log_to_driver=False, configure_logging=False)
    watcher = MachineWatcher(news)
    try:
        await watcher.join_machines(ExpectedMachines(**plan["expected"]))
    except MachinesMissingError as error:
        watcher.tell({"error": str(error)})
        return
    commands, loop = asyncio.Queue[Mapping[str, Any]](), asyncio.get_running_loop()
    threading.Thread(target=_read_commands, args=(loop, commands), daemon=True).start()
    await asyncio.gather(watcher.watch_machines(), _answer_commands(watcher, commands))


async def _answer_commands(
    watcher: MachineWatcher, commands: asyncio.Queue[Mapping[str, Any]]
) -> None:
    while True:
        await watcher.answer_command(await commands.get())


def _read_commands(
    loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Mapping[str, Any]]
) -> None:
    """Pass lines on; end the process at once with stdin."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
    os._exit(0)


def main() -> None:
    """Watch, and end without the exit handlers of Ray."""
    plan = json.loads(sys.stdin.readline())
    # What Ray prints is for the log.
    news = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Ray has workers import from the driver's folder, too.
    os.chdir("/")
    asyncio.run(watch_cluster(plan, news))
    os._exit(0)


if __name__ == "__main__":
    main()
