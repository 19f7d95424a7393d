"""Ctrl-C at any moment, and the death of the launcher: all ends, and can resume."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.harness import RANK, FaultRun

pytestmark = pytest.mark.timeout(400)
NewRun = Callable[..., FaultRun]
# The 30 s that the command gives a run to drain, and what killing the rest takes. An idle machine
# needs one or two.
GONE_S = 40.0
INTERRUPTED = 130

# Signs that a run is at a moment.
MOMENTS: dict[str, Callable[[FaultRun], bool]] = {
    "starting": lambda run: bool(run.processes(RANK)),
    "evaluating": lambda run: "evaluating" in run.output or run.sampled() > 0,
    "training": lambda run: run.steps() == 2,
    "draining": lambda run: "draining" in run.output,
}


async def interrupted(run: FaultRun, moment: str) -> None:
    """Ctrl-C at this moment of a run; then nothing of it is left."""
    await run.until(lambda: MOMENTS[moment](run))
    run.interrupt()
    code = await run.exit(GONE_S)
    assert code == INTERRUPTED, run.state()
    await run.gone(1.0)


@pytest.mark.slow
async def test_ctrl_c_again_and_again_delays_a_run_and_costs_it_nothing(
    new_run: NewRun, tmp_path: Path
) -> None:
    slow = ["python", "-c", "import time; time.sleep(30)"]
    prepared = tmp_path / "prepared"
    run = new_run(prepare=[{"creates": str(prepared), "command": slow}])
    await run.train()
    await run.until(lambda: "Making" in run.output)
    run.interrupt()
    assert await run.exit(GONE_S) == INTERRUPTED
    await run.gone(1.0)
    assert not run.begun()
    prepared.touch()
    await run.train()
    await interrupted(run, "evaluating")
    await run.train("--resume")
    await interrupted(run, "training")
    run.check_books()
    await run.train("--resume")
    await run.completes()
    await run.check_end(6)


@pytest.mark.slow
@pytest.mark.parametrize("moment", list(MOMENTS))
async def test_a_run_interrupted_at_one_moment_can_resume(new_run: NewRun, moment: str) -> None:
    run = new_run(learner={"steps": 4})
    await run.train()
    if moment == "draining":
        await run.until(lambda: MOMENTS[moment](run))
        run.interrupt()
        # What is draining because it is done may be done by then.
        assert await run.exit(GONE_S) in (0, INTERRUPTED), run.state()
        await run.check_end(4)
        return
    await interrupted(run, moment)
    await run.train("--resume")
    await run.completes()
    await run.check_end(4)


@pytest.mark.slow
async def test_a_run_whose_launcher_was_killed_resumes_under_another(new_run: NewRun) -> None:
    run = new_run(learner={"steps": 6})
    await run.train()
    await run.step(2)
    run.kill_launcher()
    await run.completes()
    assert "another one takes over" in run.output
    await run.check_end(6)
