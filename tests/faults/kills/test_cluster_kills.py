"""kill -9 of a learner, of its rank, of the rank on its second machine and of that machine: nothing
is lost or trained twice, and all comes out as if nothing had happened."""

import pytest

from tests.faults.kills.cluster_run import VICTIMS, ClusterRun
from tests.faults.kills.sharded_run import Strike
from tests.faults.kills.sharded_setting import ShardedSetting

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
STEPS, KILLS = 30, 8


@pytest.mark.timeout(1500)
async def test_machines_killed_at_random_end_as_if_nothing_had_been(
    setting: ShardedSetting,
) -> None:
    run = await setting.prepare_run(ClusterRun, STEPS)
    async with run.two_machines():
        # Each of them twice, in any order.
        for number, victim in enumerate(run.chooser.sample(VICTIMS * 2, KILLS)):
            step = max(run.planned(), number * STEPS // KILLS) + 1
            assert await run.live(Strike(victim, step, run.chooser.uniform(0.0, 0.5))) != 0
        read = await setting.ends_well(run)
    assert run.kills == dict.fromkeys(VICTIMS, KILLS // len(VICTIMS))
    assert len(read) >= KILLS / 2
