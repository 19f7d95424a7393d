"""kill -9 of a learner or of one of its two sharded ranks, while they write checkpoints beside
training: nothing is lost or trained twice, and all comes out as if nothing had happened."""

from collections import Counter

import pytest

from tests.faults.kills import strace
from tests.faults.kills.sharded_calls import TracedRun
from tests.faults.kills.sharded_run import LEARNER, RANK, ShardedRun, random_strike
from tests.faults.kills.sharded_setting import ShardedSetting

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
needs_strace = pytest.mark.skipif(bool(strace.why_not()), reason=strace.why_not() or "-")
STEPS, KILLS = 30, 8


@pytest.mark.timeout(900)
async def test_sharded_ranks_killed_at_random_end_as_if_nothing_had_been(
    setting: ShardedSetting,
) -> None:
    run = await setting.prepare_run(ShardedRun, STEPS)
    for number in range(KILLS):
        step = max(run.planned(), number * STEPS // KILLS) + 1
        assert await run.live(random_strike(run.chooser, step)) != 0
    read = await setting.ends_well(run)
    assert run.kills[LEARNER] and run.kills[RANK] and run.kills.total() == KILLS
    assert len(read) >= KILLS / 2


@needs_strace
@pytest.mark.timeout(900)
async def test_a_sharded_save_cut_off_at_any_sync_or_rename_leaves_the_old_or_the_new_one(
    setting: ShardedSetting,
) -> None:
    """Each life makes one checkpoint and is killed in the second: once at each call that strace saw
    in an undisturbed run on its files, its folder and that folder's parent, by rank 0, rank 1 and
    the learner; then as the journal is fsynced that names it, from when on it is the newest; and
    in the first, as the oldest is removed for it."""

    async def new_run(name: str, steps: int) -> TracedRun:
        run = await setting.prepare_run(TracedRun, steps, name)
        # Else the first checkpoint alone would make it.
        (run.run_dir / "checkpoints").mkdir()
        return run

    calls = await (await new_run("watched", 2)).watched_calls()
    assert Counter(call.process for call in calls) == {"rank": 3, "rank-1": 1, LEARNER: 4}, calls
    # Training continues during a save: a life plans up to three steps.
    run = await new_run("run", 3 * (len(calls) + 2) + 2)
    newest: list[int] = []
    for call in calls:
        planned = run.planned()
        await run.live_until(call)
        newest.append(run.newest())
        assert newest[-1] == planned + 1, call
    planned = run.planned()
    await run.live_until_commit()
    newest.append(run.newest())
    assert newest[-1] == planned + 2
    planned = run.planned()
    await run.live_until_removal()
    newest.append(run.newest())
    assert newest[-1] == planned + 1
    assert await setting.ends_well(run) == newest
