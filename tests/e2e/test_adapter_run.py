"""A whole run whose engine is given adapters alone: it samples what the trainer computes."""

from pathlib import Path

import pytest

from tests.e2e.finished_run import train, write_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(560)]

STEPS = 3
TOLERANCE = 1e-4


def test_a_run_is_trained_on_what_its_engine_samples_with_adapters_alone(
    quick_policy: Path, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, quick_policy, steps=STEPS)
    adapters = ("--learner.lora.rank=8", "--policy.adapter_rank=8", "--learner.optimizer.lr=1e-3")
    run = train(spec, tmp_path / "runs", *adapters, timeout_s=500.0)
    assert run.exit_code == 0, run.output[-4000:]
    assert (run.folder / "logs/rollout-0.log").read_text().count("policy loaded") >= STEPS + 1
    worst = run.metrics("mismatch/audit_abs_diff_max")
    assert worst
    assert all(record["mismatch/audit_abs_diff_max"] < TOLERANCE for record in worst)
    # The policies are not each other's.
    assert all(record["policy/grad_norm"] > 0 for record in run.metrics("policy/grad_norm"))
    assert len(set(run.rows("SELECT fingerprint FROM publications"))) == STEPS + 1
