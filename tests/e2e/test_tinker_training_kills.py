"""kill -9 of the processes of a run that samples and trains at a Tinker service, and of the
service's: nothing is lost, and no step is applied twice."""

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.tinker_campaign import MODULES, read_journal
from benchmarks.tinker_client import ServedTinker, tinker_served
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.journal.audit import audit_journal
from tests.faults.harness import GATEWAY, LEARNER, VLLM_ROLLOUT, FaultRun, spec, write_tasks
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 12
LIMIT_S = 600.0
# About the time of a step: a kill comes anywhere within one.
STEP_S = 4.0
KEY = "run"
SERVED = {
    "policy": {"dtype": "float32", "max_model_len": 512},
    "rollout": {"engine": {"device": "cpu", "max_num_seqs": 32}},
    "learner": {"rank": {"device": "cpu"}},
    # All results are counted at the end.
    "tinker": {"retention": {"delivered_s": 36_000.0, "undelivered_s": 36_000.0}},
}
# Steps with an update: of equal rewards there is nothing to learn.
MOVING_STEPS = """
SELECT count(DISTINCT step) FROM groups WHERE purpose = 'train' AND group_id IN
  (SELECT group_id FROM trajectories GROUP BY group_id HAVING min(reward) < max(reward))
"""
VICTIMS = (LEARNER, VLLM_ROLLOUT, *MODULES)


@dataclass(frozen=True, slots=True)
class HostedRun:
    run: FaultRun
    served: ServedTinker

    async def kill(self, victim: str) -> None:
        """Kill one process at some moment of the next step, and wait for its successor."""
        await self.run.step(self.run.steps() + 1)
        await asyncio.sleep(random.uniform(0, STEP_S))
        if victim in MODULES:
            await self._kill_served(MODULES[victim])
            return
        before = self.run.processes(victim)
        self.run.kill(victim)
        await self.run.restarted(victim, before)

    async def _kill_served(self, module: str) -> None:
        killed = self.served.find_service(module)
        assert killed is not None, f"{module} does not run"
        os.kill(killed, signal.SIGKILL)
        await until(lambda: self.served.find_service(module) not in (None, killed), LIMIT_S)

    async def check_end(self) -> None:
        """The run is complete and accounted for, and the service applied each of its steps once."""
        await self.run.completes()
        await self.run.check_end(STEPS)
        with closing(sqlite3.connect(self.run.folder / JOURNAL_FILE)) as db:
            books = audit_journal(db)
        assert books.holds, books
        [(moving,)] = self.run.query(MOVING_STEPS)
        assert 1 < moving <= STEPS
        assert applied_updates(self.served) == [moving]


def applied_updates(served: ServedTinker) -> list[int]:
    """The optimizer steps of each model that the service has trained, as it counts them."""
    orders = read_journal(
        served.folder,
        "SELECT count(*) FROM orders JOIN results USING (number)"
        " WHERE kind = 'optim_step' AND category IS NULL GROUP BY place",
    )
    updates = read_journal(served.folder, "SELECT updates FROM models")
    assert orders == updates
    return [count for (count,) in updates]


@pytest.fixture
async def hosted(
    quick_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[HostedRun]:
    wish = spec(quick_policy, write_tasks(tmp_path), steps=STEPS)
    # Large groups, since few attempts pass.
    sizes = {"groups_per_step": 4, "group_size": 8}
    wish["learner"] |= {"engine": "tinker", "lora": {"rank": 8}, **sizes}
    wish["rollout"] |= {"max_generate_length": 40, "max_attempts": 32, "engine": {}}
    wish["launcher"]["modules"] = {}
    async with tinker_served(quick_policy, tmp_path / "served", [KEY], **SERVED) as served:
        wish["policy"]["tinker"] = {"url": served.url, "model": str(quick_policy)}
        monkeypatch.setenv("TINKER_API_KEY", served.keys[KEY])
        run = FaultRun(tmp_path, wish)
        run.limit_s = LIMIT_S
        try:
            yield HostedRun(run, served)
        finally:
            await run.end()


async def test_each_process_is_killed_and_each_step_is_applied_once(hosted: HostedRun) -> None:
    await hosted.run.train()
    for victim in random.sample(VICTIMS, len(VICTIMS)):
        await hosted.kill(victim)
    await hosted.check_end()


async def test_a_run_that_is_killed_as_a_whole_goes_on_with_its_model(hosted: HostedRun) -> None:
    run = hosted.run
    await run.train()
    await run.step(2)
    await asyncio.sleep(random.uniform(0, STEP_S))
    run.kill_command()
    run.kill_launcher()
    run.kill(LEARNER, VLLM_ROLLOUT, GATEWAY)
    assert await run.exit() == -signal.SIGKILL
    await run.train("--resume")
    await hosted.check_end()
