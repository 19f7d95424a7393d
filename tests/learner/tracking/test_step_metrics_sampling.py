"""Metrics of the mixture of a step, by hand."""

from flotilla_learner.groups.batcher import Batch
from flotilla_learner.sampling.group_signal import GroupOutcome
from flotilla_learner.tracking.step_metrics import sampling_metrics
from tests.learner.tracking.test_metric_formulas import group
from tests.support.curriculum import Run, config, tasks_of


def test_shares_are_of_the_groups_that_were_sampled_and_of_those_that_are_trained() -> None:
    sampling = config(difficulty={"enabled": True, "min_groups": 1})
    run = Run(tasks_of(**{"shop": 4, "desk/a": 4}), sampling, seed=0, window=4)
    for _ in range(4):
        run.draw()
    run.learn([GroupOutcome("shop0", [1.0, 1.0]), GroupOutcome("shop1", [0.0, 0.0])])
    signal, flat = [1.0, 0.0], [1.0, 1.0]
    trained = (group("shop", signal), group("shop", signal), group("desk/a", signal))
    left_out = (group("shop", flat), group("desk/a", flat))
    metrics = sampling_metrics(run.curriculum, 1, Batch(trained, left_out, replaced=1))
    assert metrics["sampling/shop/share"] == 3 / 5
    assert metrics["sampling/shop/trained_share"] == 2 / 3
    assert metrics["sampling/desk_a/share"] == 2 / 5
    assert metrics["sampling/desk_a/trained_share"] == 1 / 3
    assert metrics["sampling/replaced_groups"] == 1
    assert metrics["sampling/lacking_groups"] == 1
    assert metrics["sampling/distinct_tasks"] == 4
    assert metrics["sampling/epoch"] == 0.5
    assert metrics["sampling/parked"] == metrics["sampling/shop/parked_tasks"] == 2
    assert metrics["sampling/probed"] == metrics["sampling/quarantined"] == 0
    again = sampling_metrics(run.curriculum, 2, Batch(trained, ()))
    assert again["sampling/parked"] == 0
    assert again["sampling/shop/parked_tasks"] == 2
