"""The shipped single-turn run, sampling on while weights change, by real processes and vLLM."""

import pytest

from tests.e2e.finished_run import FinishedRun, train
from tests.support.repository import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(580)]

STEPS = 15


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The spec as users have it, with fewer steps."""
    shipped = ROOT / "deploy" / "runs" / "gsm8k_cpu.toml"
    runs = tmp_path_factory.mktemp("runs")
    return train(shipped, runs, f"--learner.steps={STEPS}", timeout_s=500.0)


def test_it_learns(finished: FinishedRun) -> None:
    assert finished.exit_code == 0, finished.output
    evaluated = finished.summary["eval"]
    assert evaluated["after"]["pass_at_1"] > evaluated["before"]["pass_at_1"] + 0.2


def test_engine_and_trainer_agree_though_updates_meet_requests_at_any_moment(
    finished: FinishedRun,
) -> None:
    audited = finished.metrics("mismatch/guard_level")
    assert len(audited) == STEPS
    assert {row["mismatch/guard_level"] for row in audited} == {0.0}
    assert max(row["mismatch/audit_abs_diff_tail"] for row in audited) < 1e-4


def test_batches_were_sampled_while_others_were_trained_on(finished: FinishedRun) -> None:
    staleness = [row["async/staleness_max"] for row in finished.metrics("async/staleness_max")]
    assert max(staleness) >= 1.0
