"""Faults of a cloud: it may refuse, fail, be away, cost too much, keep something."""

import asyncio
from pathlib import Path

import pytest

from flotilla_launcher.state import Cleanup, Outcome, RunState
from tests.faults.launcher_kills.folder import opened
from tests.faults.launcher_kills.test_launcher_kills import gone, running, starting


@pytest.mark.slow
async def test_a_cloud_that_has_machines_at_the_third_attempt_gives_a_run(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        folder.cloud.script(sold_out=2)
        await starting(folder)
        assert folder.cloud.starts("learner-0") == 3
        replica = folder.stored().run.replicas["learner", 0]
        assert (replica.restarts, replica.attempt) == (0, 1)
        await folder.stop()
        await gone(folder, Outcome.STOPPED)


async def test_a_cloud_that_never_has_machines_ends_the_run_for_want_of_capacity(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        folder.cloud.script(sold_out=10_000)
        await folder.begin()
        run = (await folder.ended()).run
        assert run.state is RunState.FAILED
        assert "no machine in attempt 3" in run.error
        await gone(folder, Outcome.CAPACITY)


@pytest.mark.slow
async def test_a_setup_that_fails_again_and_again_fails_the_run(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        folder.cloud.script(setup_fails=True)
        await folder.begin(max_restarts=0)
        run = (await folder.ended()).run
        assert "setup failed on machine 2 of 2: setup exited with code 7" in run.error
        await gone(folder, Outcome.FAILED)


@pytest.mark.slow
async def test_a_crash_loop_on_machines_fails_the_run_with_the_last_lines(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        folder.cloud.script(crashes=True)
        await folder.begin(max_restarts=2)
        run = (await folder.ended()).run
        assert "rollout-0 exited with code 1; gave up after 3 failures" in run.error
        assert "the last line" in run.error
        await gone(folder, Outcome.FAILED)


async def test_a_backend_that_is_away_for_a_while_costs_a_run_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await running(folder)
        folder.cloud.script(unreachable=True)
        await folder.until(lambda: folder.stored().run.unreachable != "")
        assert (await folder.get()).unreachable == "nobody answers"
        await folder.kill()
        # A successor must not conclude anything either.
        starting_up = asyncio.create_task(folder.launch())
        await asyncio.sleep(1.0)
        folder.cloud.script(unreachable=False)
        await starting_up
        await folder.until(lambda: folder.stored().run.unreachable == "")
        run = folder.stored().run
        assert run.state is RunState.RUNNING
        assert [r.restarts for r in run.replicas.values()] == [0, 0, 0]
        assert len(folder.cloud.running()) == 3
        assert ("", "unreachable", "nobody answers") in folder.transitions("backend")
        await folder.stop()
        await gone(folder, Outcome.STOPPED)


async def test_a_run_that_has_run_for_long_enough_is_drained_and_what_it_cost_is_known(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await folder.begin(max_hours=4 / 3600)
        folder.serve()
        await folder.reached(RunState.RUNNING)
        # Time and cost continue to accrue without a launcher.
        await folder.kill()
        await folder.launch()
        run = (await folder.ended()).run
        assert run.state is RunState.STOPPED
        assert "launcher.max_hours is reached" in run.error
        # Three machines at a dollar a second.
        assert 6.0 <= run.cost.accrued <= 60.0
        assert run.cost.per_hour == 0.0
        await gone(folder, Outcome.DEADLINE)


@pytest.mark.slow
async def test_what_stays_there_is_reported_as_a_suspected_leak(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await folder.begin(clean_s=1.0)
        folder.serve()
        await folder.reached(RunState.RUNNING)
        folder.cloud.script(sticky=10_000)
        await folder.stop()
        run = await folder.get()
        assert run.cleanup_detail == "a machine is still there"
        assert folder.stored().run.cleanup is Cleanup.LEAK_SUSPECTED
        assert folder.stored().run.state is RunState.STOPPED
