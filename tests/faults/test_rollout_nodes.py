"""A rollout whose engine spans two machines in a whole run."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla_common.rpc.free_ports import free_port
from tests.faults.harness import VLLM_ROLLOUT, spec
from tests.faults.nodes import Node, Nodes, nodes
from tests.support.outsiders import beyond_loopback

_ENGINE_S = 420.0

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(580)]


@asynccontextmanager
async def running(
    folder: Path, policy: Path, tasks: Path, steps: int
) -> AsyncGenerator[tuple[Nodes, Node, Node, asyncio.subprocess.Process]]:
    """A run whose engine serves: its learner, its rollout, and the engine's further machine."""
    wish = spec(policy, tasks, steps=steps, weights={"network": "public"})
    engine = {"device": "cpu", "nodes": 2, "tensor_parallel": 2, "ray_port": free_port()}
    wish["rollout"] |= {"engine": engine, "burn_in": {"enabled": False}}
    listen = f"{beyond_loopback()}:{free_port()}"
    async with nodes(folder, wish) as started:
        gateway = await started.start("env_gateway")
        learner = await started.start("learner")
        machine = await started.second_machine("rollout", "flotilla_rollout.nodes", listen)
        peers = ("--peer", f"learner={learner.address}", "--peer", f"env_gateway={gateway.address}")
        rollout = await started.start(
            "rollout", *peers, "--listen", listen, module=VLLM_ROLLOUT, limit_s=_ENGINE_S
        )
        yield started, learner, rollout, machine


async def test_a_run_trains_on_what_two_machines_sample_and_dismisses_them(
    tmp_path: Path, policy: Path, tasks: Path
) -> None:
    async with running(tmp_path, policy, tasks, steps=2) as (started, learner, rollout, machine):
        assert await asyncio.wait_for(learner.process.wait(), 300) == 0
        assert json.loads((started.folder / "summary.json").read_text())["steps"] == 2
        rollout.process.terminate()
        assert await asyncio.wait_for(rollout.process.wait(), 60) == 0
        assert await asyncio.wait_for(machine.wait(), 30) == 0


async def test_a_rollout_that_loses_a_machine_ends_as_one_that_may_be_tried_again(
    tmp_path: Path, policy: Path, tasks: Path
) -> None:
    async with running(tmp_path, policy, tasks, steps=1000) as (_, _, rollout, machine):
        machine.kill()
        assert await asyncio.wait_for(rollout.process.wait(), 60) == 3
        assert "ENGINE_DEAD" in (output := (tmp_path / "rollout.log").read_text())
        assert "machine 1 (" in output
