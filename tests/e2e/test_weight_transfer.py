"""A whole run whose weights are sent into the live engine: it learns on what it was sent."""

from pathlib import Path

import pytest

from tests.e2e.finished_run import train, write_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(560)]

STEPS = 3
TOLERANCE = 1e-4


@pytest.mark.parametrize("transfer", ["gloo", "ipc"])
def test_a_run_is_trained_on_weights_that_are_sent_into_its_engine(
    quick_policy: Path, tmp_path: Path, transfer: str
) -> None:
    spec = write_spec(tmp_path, quick_policy, steps=STEPS)
    run = train(spec, tmp_path / "runs", f"--learner.weights.transfer={transfer}", timeout_s=500.0)
    assert run.exit_code == 0, run.output[-4000:]
    sender = (run.folder / "logs/learner-sender.log").read_text()
    assert sender.count("an engine has joined") == 1, sender[-4000:]
    assert "an engine is lost" not in sender
    # All but the first, which a worker that has just come fetches, and those until the sender ran.
    rollout = (run.folder / "logs/rollout-0.log").read_text()
    assert "joined the weight sender" in rollout, rollout[-4000:]
    assert rollout.count("policy loaded") >= STEPS
    worst = run.metrics("mismatch/audit_abs_diff_max")
    assert worst
    assert all(record["mismatch/audit_abs_diff_max"] < TOLERANCE for record in worst)
