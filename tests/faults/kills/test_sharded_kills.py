"""kill -9 of a learner or of one of its two sharded ranks, while they write checkpoints beside
training: nothing is lost or trained twice, and all comes out as if nothing had happened."""

import random
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.learner.ranks import rank_process
from tests.faults.kills.fork_server import ForkServer, tail
from tests.faults.kills.sharded_run import LEARNER, RANK, ShardedRun, random_strike
from tests.support.process_forge import ProcessForge, running_forge

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
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
    assert await run.live(None) == 0, tail(run.log)
    assert run.kills[LEARNER] and run.kills[RANK] and run.kills.total() == KILLS

    lost, books = run.books()
    assert not lost and books.holds, books
    monkeypatch.setattr(rank_process, "python_command", forge.python_command)
    undisturbed = await run.undisturbed()
    assert list(undisturbed.states) == list(range(1, STEPS + 1))
    assert run.losses() == pytest.approx(undisturbed.losses, rel=TOLERANCE, abs=TOLERANCE)
    read = run.read_states()
    assert len(read) >= KILLS / 2
    for step, state in [*read, (STEPS, run.final_state())]:
        assert_close(state, undisturbed.states[step])


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE * 1e-2)
