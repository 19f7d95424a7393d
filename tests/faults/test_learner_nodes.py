"""A learner on two machines in a whole run."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from tests.faults.harness import spec
from tests.faults.nodes import nodes
from tests.faults.test_nodes import check_refuses_strangers

SEVERAL = "--learner.rank.nodes=2"


@pytest.mark.slow
async def test_a_run_resumes_when_a_machine_of_its_learner_is_lost(
    tmp_path: Path, policy: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TEST_TASKS", str(tasks))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    wish = spec(policy, tasks, steps=3, checkpoint={"every": 1}, weights={"network": "public"})
    async with nodes(tmp_path, wish) as started:
        gateway = await started.start("env_gateway")
        learner = await started.start("learner", SEVERAL)
        machine = await started.further(learner, SEVERAL)
        await check_refuses_strangers(learner.address, "learner", "PolicyService")
        rollout = ("--peer", f"learner={learner.address}")
        await started.start("rollout", *rollout, "--peer", f"env_gateway={gateway.address}")
        checkpoint = started.folder / "checkpoints" / "step-000001" / "rank.json"
        while not checkpoint.exists():
            assert learner.process.returncode is None
            await asyncio.sleep(0.05)
        machine.kill()
        lost = time.monotonic()
        # At the next step: it may still be sampling for that.
        assert await asyncio.wait_for(learner.process.wait(), 60) == 1
        print(f"the learner ended {time.monotonic() - lost:.1f} s after its machine")
        assert "machine 1 (" in (tmp_path / "learner.log").read_text()
        again = await started.start("learner", SEVERAL, "--listen", learner.address)
        second = await started.further(again, SEVERAL)
        assert await asyncio.wait_for(again.process.wait(), 300) == 0
        assert await asyncio.wait_for(second.wait(), 20) == 0
        assert json.loads((started.folder / "summary.json").read_text())["steps"] == 3
    # A further machine keeps nothing of a run.
    _, _, files = zip(*os.walk(tmp_path / "learner-node-1"), strict=True)
    assert not any(name.endswith(".safetensors") for names in files for name in names)
