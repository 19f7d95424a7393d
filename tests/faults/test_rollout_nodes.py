"""A rollout whose engine spans two machines in a whole run."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.faults.harness import VLLM_ROLLOUT, spec
from tests.faults.nodes import Node, Nodes, nodes
from tests.support.learner import free_port
from tests.support.outsiders import beyond_loopback

_ENGINE_S = 240.0


async def start_rollout(
    started: Nodes, listen: str, learner: Node, gateway: Node
) -> tuple[Node, asyncio.subprocess.Process]:
    """The two machines of one engine, the further one first."""
    machine = await started.second_machine("rollout", "services.rollout.nodes", listen)
    peers = ("--peer", f"learner={learner.address}", "--peer", f"env_gateway={gateway.address}")
    rollout = await started.start(
        "rollout", *peers, "--listen", listen, module=VLLM_ROLLOUT, limit_s=_ENGINE_S
    )
    return rollout, machine


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(580)
async def test_a_run_goes_on_when_a_machine_of_its_engine_is_lost(
    tmp_path: Path, policy: Path, tasks: Path
) -> None:
    wish = spec(policy, tasks, steps=2, checkpoint={"every": 1}, weights={"network": "public"})
    engine = {"device": "cpu", "nodes": 2, "tensor_parallel": 2, "ray_port": free_port()}
    wish["rollout"] |= {"engine": engine, "burn_in": {"enabled": False}}
    listen = f"{beyond_loopback()}:{free_port()}"
    async with nodes(tmp_path, wish) as started:
        gateway = await started.start("env_gateway")
        learner = await started.start("learner")
        rollout, machine = await start_rollout(started, listen, learner, gateway)
        checkpoint = started.folder / "checkpoints" / "step-000001" / "rank.json"
        while not checkpoint.exists():
            assert learner.process.returncode is None and rollout.process.returncode is None
            await asyncio.sleep(0.05)
        machine.kill()
        assert await asyncio.wait_for(rollout.process.wait(), 40) == 3
        assert "ENGINE_DEAD" in (said := (tmp_path / "rollout.log").read_text())
        assert "machine 1 (" in said
        rollout, machine = await start_rollout(started, listen, learner, gateway)
        assert await asyncio.wait_for(learner.process.wait(), 120) == 0
        assert json.loads((started.folder / "summary.json").read_text())["steps"] == 2
        rollout.process.terminate()
        assert await asyncio.wait_for(rollout.process.wait(), 40) == 0
        assert await asyncio.wait_for(machine.wait(), 20) == 0
