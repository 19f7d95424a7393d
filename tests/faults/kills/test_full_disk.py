"""A disk that is full or fails: the learner reports it and ends, and the run can be resumed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.kills import strace
from tests.faults.kills.fork_server import ForkServer, tail
from tests.faults.kills.killed_run import (
    TENSORS,
    Death,
    KilledRun,
    checkpoint_files,
    journal_files,
)
from tests.faults.kills.strace import CALLS, Injection

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(strace.why_not()), reason=strace.why_not() or "-"),
]
CANNOT = "the checkpoint of step 2 cannot be written"
CHECKPOINTS = {
    "full": ("write", "rank.json", "error=ENOSPC", CANNOT),
    "full at the manifest": ("write", "manifest.json", "error=ENOSPC", CANNOT),
    "failing": ("sync", TENSORS, "error=EIO", CANNOT),
    "failing at the rename": ("rename", "", "error=EIO", CANNOT),
}
JOURNALS = {
    "full": ("write", "error=ENOSPC", "20+", "database or disk is full"),
    "failing": ("sync", "error=EIO", "8", "disk I/O error"),
}


@pytest.mark.parametrize(
    "disk",
    [
        *("full", "failing"),
        # The same at a later call.
        pytest.param("full at the manifest", marks=pytest.mark.slow),
        pytest.param("failing at the rename", marks=pytest.mark.slow),
    ],
)
async def test_a_checkpoint_that_cannot_be_written_leaves_everything_as_it_was(
    server: ForkServer, model: Path, tmp_path: Path, disk: str
) -> None:
    calls, name, effect, message = CHECKPOINTS[disk]
    run = KilledRun(server, tmp_path / "run", model, steps=3)
    await run.prepare()
    folder = run.run_dir / "checkpoints" / "step-000002.tmp-1"
    assert folder in checkpoint_files(run.run_dir, 2, 1)
    injection = Injection(CALLS[calls], [folder / name], effect, "1+")
    await fails(run, injection, [message, "fix this, then resume the run"])
    assert list((run.run_dir / "checkpoints").iterdir()) == []
    assert (await run.finish()).good


@pytest.mark.parametrize("disk", JOURNALS)
async def test_a_journal_that_cannot_be_written_acknowledges_nothing_and_is_resumed(
    server: ForkServer, model: Path, tmp_path: Path, disk: str
) -> None:
    calls, effect, when, message = JOURNALS[disk]
    run = KilledRun(server, tmp_path / "run", model, steps=2)
    await run.prepare()
    injection = Injection(CALLS[calls], journal_files(run.run_dir), effect, when)
    await fails(run, injection, [f"cannot write {run.run_dir}", message])
    assert (await run.finish()).good


async def fails(run: KilledRun, injection: Injection, messages: Sequence[str]) -> None:
    assert await run.start(Death(injection), may_fail=True) == 1, tail(run.log)
    text = tail(run.log)
    for message in messages:
        assert message in text, text
