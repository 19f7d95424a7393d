"""Shared parts of tests of killed ranks: the start of their runs, and their results."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from flotilla_learner.ranks import rank_process
from tests.faults.kills.fork_server import ForkServer, tail
from tests.faults.kills.sharded_run import ShardedRun
from tests.support.process_forge import ProcessForge

TOLERANCE = 1e-5
Run = TypeVar("Run", bound=ShardedRun)


@dataclass(frozen=True, slots=True)
class ShardedSetting:
    """The folder and the processes that the runs of one test have."""

    server: ForkServer
    model: Path
    folder: Path
    forge: ProcessForge
    patch: pytest.MonkeyPatch

    async def prepare_run(self, kind: type[Run], steps: int, name: str = "run") -> Run:
        """Return a run whose kills are chosen alike each time."""
        run = kind(
            self.server,
            self.folder / name,
            self.model,
            steps,
            every=1,
            forge=self.forge.address,
            chooser=random.Random(0),
        )
        await run.prepare()
        return run

    async def ends_well(self, run: ShardedRun) -> list[int]:
        """Live to the end, and compare all with a run without kills; return the steps of the
        checkpoints that were read."""
        assert await run.live(None) == 0, tail(run.log)
        lost, books = run.books()
        assert not lost and books.holds, books
        self.patch.setattr(rank_process, "python_command", self.forge.python_command)
        undisturbed = await run.undisturbed()
        assert list(undisturbed.states) == list(range(1, run.steps + 1))
        assert run.losses() == pytest.approx(undisturbed.losses, rel=TOLERANCE, abs=TOLERANCE)
        read = run.read_states()
        for step, state in [*read, (run.steps, run.final_state())]:
            _assert_close(state, undisturbed.states[step])
        return [step for step, _ in read]


def _assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE * 1e-2)
