import pytest
import torch
from torch import nn

from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.optimizer import Optimizer


def rates(schedule: str, *, warmup: int = 2, total: int = 6) -> list[float]:
    config = OptimizerConfig.model_validate(
        {"lr": 1.0, "warmup_steps": warmup, "schedule": schedule}
    )
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_after_the_warm_up_constant_stays() -> None:
    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_after_the_warm_up_linear_falls_and_wastes_no_step() -> None:
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_after_the_warm_up_cosine_falls() -> None:
    cosine = rates("cosine", warmup=0, total=4)
    assert cosine == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


def test_one_update_is_adamw_in_closed_form() -> None:
    weight = nn.Parameter(torch.full((2, 2), 3.0))
    bias = nn.Parameter(torch.full((2,), 3.0))
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, grad_clip=0.0)
    optimizer = Optimizer({"weight": weight, "bias": bias}, config)
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    update = optimizer.step(0.1)
    # The first update of Adam moves by lr; decay multiplies matrices by 1 - lr * decay.
    torch.testing.assert_close(weight.data, torch.full((2, 2), 3.0 * 0.95 - 0.1))
    torch.testing.assert_close(bias.data, torch.full((2,), 2.9))
    assert update.grad_norm == pytest.approx(6**0.5)
    assert weight.grad is None


def test_gradients_are_clipped_to_the_norm() -> None:
    weight = nn.Parameter(torch.zeros(1, 4))
    optimizer = Optimizer({"weight": weight}, OptimizerConfig(lr=1.0, grad_clip=1.0, eps=1.0))
    weight.grad = torch.full((1, 4), 50.0)
    assert optimizer.step(1.0).grad_norm == pytest.approx(100.0)
    # Clipped to 0.5 each; Adam's first update is g / (|g| + eps).
    torch.testing.assert_close(weight.data, torch.full((1, 4), -0.5 / 1.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_gradient_is_thrown_away(poison: float) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer({"weight": weight}, OptimizerConfig())
    weight.grad = torch.tensor([[1.0, poison], [1.0, 1.0]])
    assert optimizer.step(0.1).skipped
    assert torch.equal(weight.data, torch.ones(2, 2))
    assert optimizer.state_tensors() == {}


def test_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer({"weight": nn.Parameter(torch.ones(2, 2))}, OptimizerConfig())
    with pytest.raises(ValueError, match="another model: it has 'other'"):
        optimizer.add_empty_state(["exp_avg.other"])
