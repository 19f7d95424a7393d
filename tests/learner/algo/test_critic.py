import pytest
import torch

from flotilla_learner.algo.critic import clipped_value_loss


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        # Old value 1, return 2, clip 0.2: the value is held within 0.8 and 1.2.
        (1.1, 0.9**2 / 2, -0.9, False),
        (1.5, 0.8**2 / 2, 0.0, True),
        (0.5, 1.5**2 / 2, -1.5, False),
    ],
)
def test_the_loss_is_the_worse_of_the_value_and_the_held_value(
    value: float, loss: float, slope: float, clipped: bool
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([1.0]).double(), torch.tensor([2.0]).double()
    found = clipped_value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(found.loss.sum(), values)
    assert float(found.loss.detach()) == pytest.approx(loss)
    assert float(gradient) == pytest.approx(slope)
    assert bool(found.clipped) is clipped


def test_passes_the_numerical_gradient_check() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    leaf = values.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, 0.5).loss, leaf)
