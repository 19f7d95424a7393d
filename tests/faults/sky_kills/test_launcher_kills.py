"""kill -9 of a launcher whose machines are SkyPilot's, and StopRun, in every phase."""

from pathlib import Path

import pytest

from flotilla_launcher.state import Outcome, RunState
from tests.faults.sky_kills import phases
from tests.faults.sky_kills.folder import SERVICES, opened
from tests.faults.sky_kills.phases import Phase

_PHASES = (
    phases.preflight,
    phases.submitting,
    phases.without_capacity,
    phases.booting,
    phases.setting_up,
    phases.starting,
    phases.training,
)
_slow = pytest.mark.slow


def _each(*quick: Phase) -> pytest.MarkDecorator:
    """All phases; in default runs these."""
    params = [pytest.param(p, marks=() if p in quick else _slow, id=p.__name__) for p in _PHASES]
    return pytest.mark.parametrize("phase", params)


@_each(phases.booting)
async def test_a_successor_resumes_where_the_launcher_was_killed(
    tmp_path: Path, phase: Phase
) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        await folder.kill()
        before = set(folder.machines())
        folder.hold.unlink(missing_ok=True)
        await folder.launch()
        folder.serve()
        await folder.reached(RunState.RUNNING)
        assert before <= set(folder.machines()), "what ran keeps running"
        assert len(folder.machines()) == 3
        assert set(folder.state.most.values()) == {1}, "no replica ever has two machines"
        assert [r.failures for r in folder.stored().run.replicas.values()] == [(), (), ()]
        if phase is not phases.without_capacity:
            assert [folder.machine_requests(service) for service in SERVICES] == [1, 1, 1]
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


@_each(phases.training)
async def test_a_run_cancelled_in_any_phase_leaves_no_machine(tmp_path: Path, phase: Phase) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        await folder.stop(2.0)
        assert folder.stored().run.state is RunState.STOPPED
        await folder.gone(Outcome.STOPPED)
        await folder.settled(2.0)


@pytest.mark.parametrize("phase", [phases.draining, phases.tearing_down])
@pytest.mark.parametrize("killed", [pytest.param(True, id="kill"), pytest.param(False, id="stop")])
@_slow
async def test_a_run_that_ends_keeps_ending(tmp_path: Path, phase: Phase, killed: bool) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        if killed:
            await folder.kill()
            await folder.launch()
        else:
            await folder.stop(0.0)
        await folder.gone(Outcome.STOPPED)


@_each()
async def test_a_run_cancelled_at_the_successor_of_a_killed_launcher_leaves_no_machine(
    tmp_path: Path, phase: Phase
) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        await folder.kill()
        await folder.launch()
        await folder.stop(2.0)
        await folder.gone(Outcome.STOPPED)
        await folder.settled(2.0)
