"""Machines on which real watchers keep fake services, found by a real launcher."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.state import Outcome, RunState
from tests.faults.sky_kills.folder import INFRAS, PRICES, SERVICES, SkyFolder, opened

_HAS = "rollout-0 has the machine"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def _begin(folder: SkyFolder, launcher: dict[str, Any], **sections: Any) -> None:
    folder.script(bare=False)
    await folder.start(folder.wish(launcher, **sections))


async def test_a_run_on_machines_completes_and_its_logs_are_the_launchers(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await _begin(folder, {}, learner={"steps": 5, "message": "a learner's words"})
        run = (await folder.gone(Outcome.COMPLETED)).run
        assert run.state is RunState.COMPLETED
        lines = await folder.logs("learner")
        assert any("a learner's words from learner-0" in line for line in lines), lines


def _due(folder: SkyFolder) -> float:
    """The price of the machines that the cloud has given, an hour; 0 before all have come."""
    if len(folder.machines()) < len(SERVICES):
        return 0.0
    came = [folder.state.infras[folder.name(service)][-1] for service in SERVICES]
    return sum(PRICES[INFRAS.index(infra)] for infra in came)


async def test_what_machines_cost_is_the_price_of_those_that_came(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        folder.script(sold_out=1)
        await _begin(folder, {}, learner={"steps": 5000})
        await folder.until(lambda: 0 < _due(folder) == folder.stored().run.cost.per_hour)
        assert folder.state.infras[folder.name("learner")] == list(INFRAS)
        due = _due(folder)
        assert due == 3 * PRICES[1]
        await folder.kill()
        await folder.launch()
        assert folder.stored().run.cost.per_hour == due
        await folder.stop(20.0)
        run = (await folder.gone(Outcome.STOPPED)).run
        assert run.cost.per_hour == 0.0


async def test_a_crash_loop_fails_the_run_with_the_last_lines(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await _begin(
            folder, {"max_restarts": 1}, learner={"steps": 500}, rollout={"crash": "always"}
        )
        run = (await folder.gone(Outcome.FAILED)).run
        assert run.state is RunState.FAILED
        assert "rollout-0 exited with code 1; gave up after 2 failures" in run.error
        assert "last words: out of luck" in run.error


async def test_machines_that_are_requested_repeatedly_use_up_no_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await _begin(folder, {"max_restarts": 2}, learner={"steps": 5000})
        # Once more than there are restarts.
        for lost in range(1, 4):
            await folder.until(lambda number=lost: folder.news(_HAS) == number)
            folder.post("preempt", cluster=folder.name("rollout"), notice=True)
        await folder.until(lambda: folder.news(_HAS) == 4 and folder.serving("rollout"))
        await folder.reached(RunState.RUNNING)
        replicas = folder.stored().run.replicas.values()
        assert [replica.failures for replica in replicas] == [(), (), ()]
        await folder.stop(20.0)
        await folder.gone(Outcome.STOPPED)
