"""A service's further machines, watched by its head, over real Ray nodes."""

import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flotilla_common.ray_cluster.machine_resources import ExpectedMachines, machine_offers
from flotilla_common.ray_cluster.machine_watch import MachinesLostError, MachineWatch
from flotilla_common.ray_cluster.node_folder import NodeFolder
from flotilla_common.ray_cluster.ray_node import NodePlan, RayNode
from flotilla_common.rpc.free_ports import free_port

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests-of-machines"
HEAD, FURTHER = "127.0.0.2", "127.0.0.1"


@dataclass
class Machines:
    """A head, and one further machine whose folders are `folder`."""

    port: int
    folder: NodeFolder
    logs: Path

    async def watch(self, count: int = 2, join_s: float = 60.0) -> MachineWatch:
        expected = ExpectedMachines(
            count, 1, count, join_s, "flotilla_rollout.nodes", "x.workers", "go"
        )
        address = f"{HEAD}:{self.port}"
        return await MachineWatch.open_watch(address, TOKEN, expected, self.logs / "watch.log")


@asynccontextmanager
async def machines(folder: Path) -> AsyncGenerator[Machines]:
    port = free_port()
    plan = NodePlan(HEAD, port, resources=machine_offers(0, 1))
    head = await RayNode.start_node(plan, TOKEN, folder / "head.log")
    node = NodeFolder(folder, folder)
    plan = NodePlan(HEAD, port, FURTHER, resources=machine_offers(1, 1))
    log, environment = folder / "further.log", node.to_environment()
    further = await RayNode.start_node(plan, TOKEN, log, environment)
    try:
        yield Machines(port, node, folder)
    finally:
        for each in (further, head):
            await each.close()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the running processes of the node whose marks are in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FLOTILLA_RAY_NODE") == str(folder):
                found.append(process)
    return found


async def test_a_machine_reports_that_it_has_to_go_and_is_dismissed(tmp_path: Path) -> None:
    async with machines(tmp_path) as there:
        watch = await there.watch()
        assert watch.names[0].startswith("machine 1 (")
        (tmp_path / "worker-1.log").write_text("its last words")
        assert "its last words" in await watch.read_tails("worker-{number}.log")
        assert there.folder.joined.exists()
        there.folder.leaving.touch()
        assert await watch.wait_until_one_leaves() == watch.names[0]
        assert watch.lost is None
        await watch.dismiss_machines()
        assert there.folder.over.exists()
        await watch.close()
        missing = r"machine 2 of 3 has not joined in 1 s: run `python -m flotilla_rollout\.nodes"
        with pytest.raises(MachinesLostError, match=missing):
            await there.watch(count=3, join_s=1.0)


async def test_a_machine_that_stands_still_is_lost_within_seconds(tmp_path: Path) -> None:
    async with machines(tmp_path) as there:
        watch = await there.watch()
        stopped = processes_of(tmp_path)
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            silent = f"{watch.names[0]} does not answer"
            assert await watch.read_tails("*.log") == silent
            assert (await watch.wait_until_lost()).startswith(f"{watch.names[0]} is lost")
            assert time.monotonic() - started < 20
            assert await watch.read_tails("*.log") == silent
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await watch.close()
