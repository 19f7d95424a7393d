"""Watcher of a cluster's machines: `python -m flotilla_common.ray_cluster.adapters.watch_program`.

Not for use by hand: `machine_watch.py` starts it, and both exchange lines of JSON. It waits for the
machines, then reports when one has to leave or is lost. It ends with stdin."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.ray_cluster.machine_resources import ExpectedMachines, machine_resource
from flotilla_common.text.json_lines import encode_line

# Each machine offers 1 of its resource, and each actor takes this fraction.
_SHARE = 0.001
_ANSWER_S = 3.0


class MachineWatcher:
    """An actor on each further machine, for as long as this process lives."""

    def __init__(self, parent: ParentChannel) -> None:
        """Start without machines; reports go to `parent`."""
        self._parent = parent
        self._actors: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def report(self, message: Mapping[str, Any]) -> None:
        """Send a message to the service."""
        self._parent.write(encode_line(message))

    async def join_machines(self, expected: ExpectedMachines) -> None:
        """Wait for the machines and report their names. Raises MachinesMissingError."""
        import ray

        from flotilla_common.ray_cluster.adapters.joined_machines import wait_for_machines
        from flotilla_common.ray_cluster.adapters.node_actor import NodeActor

        remote: Any = ray.remote(NodeActor)
        for number in await wait_for_machines(expected):
            placed = remote.options(
                num_cpus=0, max_restarts=0, resources={machine_resource(number): _SHARE}
            )
            self._actors[number] = placed.remote()
        joins = (actor.join_service.remote() for actor in self._actors.values())
        for number, host in zip(self._actors, await asyncio.gather(*joins), strict=True):
            self._names[number] = f"machine {number} ({host})"
        self.report({"joined": list(self._names.values())})

    async def watch_machines(self) -> None:
        """Report machines that have to leave or are lost; return when all are lost."""
        numbers = self._actors
        await asyncio.gather(
            *(self._watch_leaving(number) for number in numbers),
            *(self._watch_loss(number) for number in numbers),
        )

    async def _watch_leaving(self, number: int) -> None:
        from ray.exceptions import RayActorError

        # The other watch reports lost machines.
        with suppress(RayActorError):
            await self._actors[number].wait_until_leaving.remote()
            self.report({"leaving": self._names[number]})

    async def _watch_loss(self, number: int) -> None:
        from ray.exceptions import RayActorError

        try:
            await self._actors[number].stay.remote()
        except RayActorError:
            self.report({"lost": self._names[number]})

    async def answer_command(self, command: Mapping[str, Any]) -> None:
        """Carry out one line of stdin, and report the answer."""
        if "tails" in command:
            pattern: str = command["tails"]
            tails = await self._call_all(
                lambda actor, number: actor.read_tails.remote(pattern.format(number=number))
            )
            silent = (f"{self._names[each]} does not answer" for each in self._names.keys() - tails)
            self.report({"answer": "\n".join((*silent, *filter(None, tails.values())))})
        else:
            await self._call_all(lambda actor, _: actor.dismiss_node.remote())
            self.report({"answer": ""})

    async def _call_all(self, call: Callable[[Any, int], Any]) -> Mapping[int, str]:
        """Return the answers by machine; machines that do not answer in time are left out."""
        calls = {
            number: asyncio.ensure_future(call(actor, number))
            for number, actor in self._actors.items()
        }
        await asyncio.wait(calls.values(), timeout=_ANSWER_S)
        return {
            number: task.result()
            for number, task in calls.items()
            if task.done() and not task.exception()
        }


async def watch_cluster(plan: Mapping[str, Any], parent: ParentChannel) -> None:
    """Watch the machines of the cluster that the first line describes."""
    # Ray reads these variables when it is imported.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": plan["token"]}
    import ray

    from flotilla_common.ray_cluster.adapters.joined_machines import MachinesMissingError

    ray.init(plan["address"], log_to_driver=False, configure_logging=False)
    watcher = MachineWatcher(parent)
    try:
        await watcher.join_machines(ExpectedMachines(**plan["expected"]))
    except MachinesMissingError as error:
        watcher.report({"error": str(error)})
        return
    commands, loop = asyncio.Queue[Mapping[str, Any]](), asyncio.get_running_loop()
    threading.Thread(target=_read_commands, args=(parent, loop, commands), daemon=True).start()
    await asyncio.gather(watcher.watch_machines(), _answer_commands(watcher, commands))


async def _answer_commands(
    watcher: MachineWatcher, commands: asyncio.Queue[Mapping[str, Any]]
) -> None:
    while True:
        await watcher.answer_command(await commands.get())


def _read_commands(
    parent: ParentChannel,
    loop: asyncio.AbstractEventLoop,
    commands: asyncio.Queue[Mapping[str, Any]],
) -> None:
    """Forward lines; end the process at once when stdin ends."""
    for line in parent.read_lines():
        loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
    os._exit(0)


def main() -> None:
    """Watch, and end without the exit handlers of Ray."""
    # Ray's own output belongs in the log.
    parent = ParentChannel()
    plan = json.loads(parent.requests.readline())
    # Ray makes workers import from the driver's folder too.
    os.chdir("/")
    asyncio.run(watch_cluster(plan, parent))
    os._exit(0)


if __name__ == "__main__":
    main()
