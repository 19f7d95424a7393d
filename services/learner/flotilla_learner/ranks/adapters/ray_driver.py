"""Driver of the ranks on other machines: `python -m flotilla_learner.ranks.adapters.ray_driver`.

Not for use by hand. A child of the learner that uses the frames of `ranks/protocol.py`, so that
Ray's threads, handlers and connections stay out of the service. However it ends, Ray then ends its
actors, and with them their ranks."""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.aio.concurrency import wait_for_any
from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.ray_cluster.machine_resources import WORKER_RESOURCE, machine_resource
from flotilla_common.text.printable_text import print_visible
from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.cluster_plan import ActorPlan, ClusterPlan

_PLACE_S = 60.0
_CLOSE_S = 8.0


class GroupError(Exception):
    """The group cannot be opened; the message gives the fix."""


class RayDriver:
    """One group of ranks: a placement group with an actor per rank."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._names: list[str] = []
        # First actor of each machine, by machine number.
        self._first: dict[int, Any] = {}

    async def open(self, arguments: Mapping[str, Any]) -> protocol.Message:
        """Wait for the machines and place the ranks; return their names in order.

        Raises GroupError, MachinesMissingError."""
        plan = ClusterPlan(**arguments)
        # Ray reads these when it is imported.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": plan.token}
        import ray

        from flotilla_common.ray_cluster.adapters.joined_machines import wait_for_machines

        ray.init(plan.address, namespace=plan.run_id, log_to_driver=False, configure_logging=False)
        numbers = await wait_for_machines(plan.expected)
        if not numbers:
            return {"names": []}
        group = await _place_group(plan, numbers)
        for bundle, number in enumerate(numbers):
            self._place_actors(plan, group, bundle, number)
        hosts = await asyncio.gather(*(actor.start_rank.remote() for actor in self._actors))
        self._names = [
            f"machine {numbers[index // plan.processes]} ({host})"
            for index, host in enumerate(hosts)
        ]
        return {"names": self._names}

    async def call(self, arguments: Mapping[str, Any]) -> protocol.Message:
        """Have a rank run a command; return its `result`, or its `error` and if it `ended`."""
        from ray.exceptions import RayActorError

        index = arguments["rank"]
        run = self._actors[index].run_command.remote(arguments["command"], arguments["arguments"])
        try:
            answer = await run
        except RayActorError as error:
            answer = {"error": f"its actor is gone: {error}", "ended": True}
        if "error" in answer:
            answer["error"] = f"{self._names[index]}: {answer['error']}"
        return answer

    async def leaving(self, _: Mapping[str, Any]) -> protocol.Message:
        """Wait until a machine is about to leave; return its number."""
        waits = {
            number: asyncio.ensure_future(actor.wait_until_leaving.remote())
            for number, actor in self._first.items()
        }
        await wait_for_any(waits.values())
        ended = [number for number, wait in waits.items() if wait.done() and not wait.exception()]
        return {"machine": ended[0] if ended else None}

    async def dismiss(self, _: Mapping[str, Any]) -> protocol.Message:
        """Notify all machines that the learner has ended normally."""
        await asyncio.gather(*(actor.dismiss_node.remote() for actor in self._first.values()))
        return {}

    async def close(self) -> None:
        """End the ranks cleanly, as far as they answer."""
        import ray

        closing = [asyncio.ensure_future(actor.close_rank.remote()) for actor in self._actors]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)
            ray.shutdown()

    def _place_actors(self, plan: ClusterPlan, group: Any, bundle: int, number: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from flotilla_learner.ranks.adapters.rank_actor import RankActor

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        remote: Any = ray.remote(RankActor)
        placed = remote.options(
            num_cpus=0,
            num_gpus=int(plan.gpus),
            resources={WORKER_RESOURCE: 1},
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        for slot in range(plan.processes):
            index = plan.processes + len(self._actors)
            ranked = ActorPlan(number, slot, index, plan.model, plan.revision, plan.environment)
            self._actors.append(placed.remote(ranked))
        self._first[number] = self._actors[-plan.processes]


async def _place_group(plan: ClusterPlan, numbers: Sequence[int]) -> Any:
    """Return the placement group with a bundle on each machine, once it is placed."""
    from ray.util.placement_group import placement_group

    gpus = {"GPU": plan.processes} if plan.gpus else {}
    bundles: list[dict[str, float]] = [
        {WORKER_RESOURCE: plan.processes, machine_resource(number): 1, **gpus} for number in numbers
    ]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        async with asyncio.timeout(_PLACE_S):
            await group.ready()
    except TimeoutError:
        raise GroupError(
            f"Ray has not placed {plan.processes} ranks on each of the machines"
            f" {', '.join(map(str, numbers))} in {_PLACE_S:g} s: an older group of this run may"
            " still hold them"
        ) from None
    return group


async def serve_commands(parent: ParentChannel) -> None:
    """Serve until the command `close`."""
    driver, inbox = RayDriver(), asyncio.Queue[protocol.Message]()
    loop = asyncio.get_running_loop()
    threading.Thread(
        target=_read_commands, args=(parent.requests, loop, inbox), daemon=True, name="commands"
    ).start()
    serving = BackgroundTasks()
    while (message := await inbox.get())["command"] != "close":
        serving.start_task(_answer_message(driver, message, parent))
    await driver.close()


def _read_commands(
    commands: BinaryIO, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[protocol.Message]
) -> None:
    """Pass commands on; end the process at once when the learner is gone."""
    while (message := protocol.read_frame(commands)) is not None:
        loop.call_soon_threadsafe(inbox.put_nowait, message)
        if message["command"] == "close":
            return
    os._exit(protocol.ORPHANED_EXIT_CODE)


async def _answer_message(
    driver: RayDriver, message: protocol.Message, parent: ParentChannel
) -> None:
    handlers = {
        "open": driver.open,
        "call": driver.call,
        "leaving": driver.leaving,
        "dismiss": driver.dismiss,
    }
    try:
        outcome: protocol.Message = {
            "result": await handlers[message["command"]](message["arguments"])
        }
    # Boundary of the process: the learner must learn of any failure.
    except Exception as error:  # noqa: BLE001
        print_visible(traceback.format_exc(), end="", file=sys.stderr)
        outcome = {"error": f"{type(error).__name__}: {error}"}
    parent.write(protocol.encode_frame({"id": message["id"], **outcome}))


def main() -> None:
    """Serve the learner, and end without Ray's exit handlers."""
    parent = ParentChannel()
    # Ray makes workers import from the driver's folder, too.
    os.chdir("/")
    asyncio.run(serve_commands(parent))
    os._exit(0)


if __name__ == "__main__":
    main()
