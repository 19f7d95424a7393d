"""kill -9 of the launcher in every phase: its successor takes the run over, nothing is started
twice, and in the end no machine is left."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flotilla_launcher.state import Cleanup, Outcome, RunState
from tests.faults.launcher_kills.folder import Folder, opened


async def preflight(folder: Folder) -> None:
    folder.hold.touch()
    await folder.begin()
    await folder.reached(RunState.PREFLIGHT)


async def provisioning(folder: Folder) -> None:
    """Every machine boots, and none has registered."""
    folder.cloud.script(start_s=1.0)
    await folder.begin()
    await folder.until(lambda: len(folder.cloud.running()) == 3)


async def without_capacity(folder: Folder) -> None:
    folder.cloud.script(sold_out=1)
    await folder.begin()
    await folder.until(lambda: folder.cloud.starts("learner-0") > 0)


async def starting(folder: Folder) -> None:
    await folder.begin()
    await folder.reached(RunState.STARTING)


async def running(folder: Folder) -> None:
    await folder.begin()
    folder.serve()
    await folder.reached(RunState.RUNNING)


Phase = Callable[[Folder], Awaitable[None]]
PHASES = [
    provisioning,
    running,
    *(pytest.param(p, marks=pytest.mark.slow) for p in (preflight, without_capacity, starting)),
]


async def gone(folder: Folder, outcome: Outcome) -> None:
    """No machine, and a ledger that agrees."""
    run = folder.stored().run
    assert folder.cloud.running() == []
    assert (run.outcome, run.cleanup) == (outcome, Cleanup.VERIFIED), run
    await folder.until(lambda: not (folder.runs / ".identity" / folder.run_id).exists())
    open_operations = "SELECT * FROM operations WHERE state IN ('intent', 'sent')"
    assert folder.ledger(open_operations) == []


@pytest.mark.parametrize("phase", PHASES)
async def test_a_successor_resumes_where_the_launcher_was_killed(
    tmp_path: Path, phase: Phase
) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        await folder.kill()
        before = folder.cloud.running()
        folder.hold.unlink(missing_ok=True)
        await folder.launch()
        folder.serve()
        await folder.reached(RunState.RUNNING)
        assert set(before) <= set(folder.cloud.running()), "what ran keeps running"
        starts = {label: folder.cloud.starts(label) for label in ("learner-0", "rollout-0")}
        wanted = 2 if phase is without_capacity else 1
        assert starts == dict.fromkeys(starts, wanted), "nothing is started twice"
        assert [r.restarts for r in folder.stored().run.replicas.values()] == [0, 0, 0]
        await folder.stop()
        await gone(folder, Outcome.STOPPED)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_run_cancelled_in_any_phase_leaves_no_machine(tmp_path: Path, phase: Phase) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        await folder.stop()
        assert folder.stored().run.state is RunState.STOPPED
        await gone(folder, Outcome.STOPPED)


async def test_a_launcher_killed_while_it_drains_and_tears_down_has_a_successor_that_ends_it(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await running(folder)
        folder.cloud.script(sticky=10_000)
        stopping = asyncio.create_task(folder.stop())
        await folder.reached(RunState.TEARDOWN)
        await folder.kill()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        assert folder.stored().run.cleanup is Cleanup.VERIFYING
        folder.cloud.script(sticky=1)
        await folder.launch()
        await folder.ended()
        await gone(folder, Outcome.STOPPED)


async def test_what_ended_while_no_launcher_was_there_counts_and_is_started_again(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await running(folder)
        await folder.kill()
        folder.cloud.finish("rollout-0", code=1)
        await folder.launch()
        await folder.until(lambda: folder.cloud.starts("rollout-0") == 2)
        await folder.until(lambda: len(folder.cloud.running()) == 3)
        causes = [cause for _, _, cause in folder.transitions("rollout-0")]
        assert "it ended while no launcher was there" in causes
        await folder.stop()
        await gone(folder, Outcome.STOPPED)


async def test_a_machine_of_no_run_is_ended_by_the_next_launcher(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await starting(folder)
        await folder.kill()
        folder.ledger_write("DELETE FROM replicas WHERE service = 'rollout'")
        folder.ledger_write("UPDATE runs SET run_json = json_remove(run_json, '$.wanted.rollout')")
        await folder.launch()
        assert [name.rpartition("%")[2] for name in folder.cloud.running()] == [
            "env_gateway-0",
            "learner-0",
        ]
        await folder.stop()
        await gone(folder, Outcome.STOPPED)
