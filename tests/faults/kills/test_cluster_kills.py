"""kill -9 of a learner, of its rank, of the rank on its second machine and of that machine: nothing
is lost or trained twice, and all comes out as if nothing had happened."""

import random
from pathlib import Path

import pytest

from tests.faults.kills.cluster_run import VICTIMS, ClusterRun
from tests.faults.kills.fork_server import ForkServer
from tests.faults.kills.sharded_run import Strike
from tests.faults.kills.test_sharded_kills import ends_well, forge
from tests.support.process_forge import ProcessForge

__all__ = ["forge"]
pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
STEPS, KILLS = 30, 8


@pytest.mark.timeout(1500)
async def test_machines_killed_at_random_end_as_if_nothing_had_been(
    server: ForkServer,
    model: Path,
    tmp_path: Path,
    forge: ProcessForge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser = random.Random(0)
    run = ClusterRun(
        server, tmp_path / "run", model, STEPS, every=1, forge=forge.address, chooser=chooser
    )
    await run.prepare()
    async with run.two_machines():
        # Each of them twice, in any order.
        for number, victim in enumerate(chooser.sample(VICTIMS * 2, KILLS)):
            step = max(run.planned(), number * STEPS // KILLS) + 1
            assert await run.live(Strike(victim, step, chooser.uniform(0.0, 0.5))) != 0
        read = await ends_well(run, forge, monkeypatch)
    assert run.kills == dict.fromkeys(VICTIMS, KILLS // len(VICTIMS))
    assert len(read) >= KILLS / 2
