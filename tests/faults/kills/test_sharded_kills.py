"""kill -9 of a learner or of one of its two sharded ranks, while they write checkpoints beside
training: nothing is lost or trained twice, and all comes out as if nothing had happened."""

import random
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.learner.ranks import rank_process
from tests.faults.kills import strace
from tests.faults.kills.fork_server import ForkServer, tail
from tests.faults.kills.sharded_calls import TracedRun
from tests.faults.kills.sharded_run import LEARNER, RANK, ShardedRun, random_strike
from tests.support.process_forge import ProcessForge, running_forge

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
needs_strace = pytest.mark.skipif(bool(strace.why_not()), reason=strace.why_not() or "-")
STEPS, KILLS, TOLERANCE = 30, 8, 1e-5


@pytest.fixture(scope="module")
def forge() -> Generator[ProcessForge]:
    with running_forge("services.learner.rank.worker", 1) as found:
        yield found


@pytest.mark.timeout(900)
async def test_sharded_ranks_killed_at_random_end_as_if_nothing_had_been(
    server: ForkServer,
    model: Path,
    tmp_path: Path,
    forge: ProcessForge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser = random.Random(0)
    run = ShardedRun(
        server, tmp_path / "run", model, STEPS, every=1, forge=forge.address, chooser=chooser
    )
    await run.prepare()
    for number in range(KILLS):
        step = max(run.planned(), number * STEPS // KILLS) + 1
        assert await run.live(random_strike(chooser, step)) != 0
    read = await ends_well(run, forge, monkeypatch)
    assert run.kills[LEARNER] and run.kills[RANK] and run.kills.total() == KILLS
    assert len(read) >= KILLS / 2


@needs_strace
@pytest.mark.timeout(900)
async def test_a_sharded_save_cut_off_at_any_sync_or_rename_leaves_the_old_or_the_new_one(
    server: ForkServer,
    model: Path,
    tmp_path: Path,
    forge: ProcessForge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each life makes one checkpoint and is killed in the second: once at each call that strace saw
    in an undisturbed run on its files, its folder and that folder's parent, by rank 0, rank 1 and
    the learner; then as the journal is fsynced that names it, from when on it is the newest; and
    in the first, as the oldest is removed for it."""

    async def new_run(name: str, steps: int) -> TracedRun:
        run = TracedRun(
            server,
            tmp_path / name,
            model,
            steps,
            every=1,
            forge=forge.address,
            chooser=random.Random(0),
        )
        await run.prepare()
        # Else the first checkpoint alone would make it.
        (run.run_dir / "checkpoints").mkdir()
        return run

    calls = await (await new_run("watched", 2)).watched_calls()
    assert Counter(call.process for call in calls) == {"rank": 3, "rank-1": 1, LEARNER: 4}, calls
    # Training goes on beside a save: a life plans up to three steps.
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
    assert await ends_well(run, forge, monkeypatch) == newest


async def ends_well(
    run: ShardedRun, forge: ProcessForge, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Live to the end, and compare all with a run that nobody kills; return the steps of the
    checkpoints that were read."""
    assert await run.live(None) == 0, tail(run.log)
    lost, books = run.books()
    assert not lost and books.holds, books
    monkeypatch.setattr(rank_process, "python_command", forge.python_command)
    undisturbed = await run.undisturbed()
    assert list(undisturbed.states) == list(range(1, run.steps + 1))
    assert run.losses() == pytest.approx(undisturbed.losses, rel=TOLERANCE, abs=TOLERANCE)
    read = run.read_states()
    for step, state in [*read, (run.steps, run.final_state())]:
        assert_close(state, undisturbed.states[step])
    return [step for step, _ in read]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE * 1e-2)
