"""`flotilla scale` in mid-run, on real services."""

from collections.abc import Callable

import pytest

from tests.faults.harness import ROLLOUT, FaultRun
from tests.launcher.cli.test_app import run_cli

pytestmark = pytest.mark.timeout(400)
NewRun = Callable[..., FaultRun]
# Trajectories in committed steps, by the worker that they were leased to.
TRAINED_BY = """
SELECT DISTINCT leases.worker_id FROM plans, json_each(plans.attempts)
JOIN leases ON leases.group_id = json_extract(json_each.value, '$[0]')
WHERE NOT EXISTS (
  SELECT 1 FROM leases other
  WHERE other.group_id = leases.group_id AND other.worker_id != leases.worker_id)
"""


@pytest.mark.slow
async def test_a_second_rollout_takes_part_and_leaves_again(new_run: NewRun) -> None:
    run = new_run(learner={"steps": 100})
    await run.train()
    await run.step(1)
    await scale(run, 2)
    await run.until(lambda: ("rollout-1",) in run.query(TRAINED_BY))
    await scale(run, 1)
    await run.until(lambda: len(run.processes(ROLLOUT)) == 1)
    done = run.steps()
    await run.step(done + 2)
    log = (run.folder / "logs" / "rollout-1.log").read_text()
    assert "the service ended" in log
    run.interrupt()
    assert await run.exit() == 130
    await run.gone(1.0)
    run.check_books()


async def scale(run: FaultRun, replicas: int) -> None:
    code, output = await run_cli("scale", "newest", f"rollout={replicas}", "--runs", str(run.runs))
    assert code == 0, output
