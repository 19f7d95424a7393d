import math

import pytest
import torch

from flotilla_learner.algo.mismatch import Mismatch, measure_mismatch


def test_mismatch_in_closed_form() -> None:
    logprobs = torch.tensor([math.log(2.0), 0.0, -1.0])
    behaviour = torch.tensor([0.0, 0.0, -0.5])
    metrics = measure_mismatch(logprobs, behaviour).to_metrics()
    assert metrics["mismatch/is_ratio_max"] == pytest.approx(2.0)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx((math.log(2) + 0.5) / 3)
    k3 = (2 - 1 - math.log(2)) + (math.exp(-0.5) - 1 + 0.5)
    assert metrics["mismatch/kl_train_infer"] == pytest.approx(k3 / 3, rel=1e-6)
    assert Mismatch().to_metrics() == {}
