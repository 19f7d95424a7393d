import math

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.corrections import (
    CorrectionInput,
    compute_correction,
    needs_sequences,
    needs_trainer_logprobs,
)
from flotilla_learner.config.algorithm import CorrectionConfig

# Ratios trainer / sampler of two sequences: products 2 and 0.5, geometric means 2 ** (1 / 3) and
# 0.5 ** (1 / 2).
RATIOS = [4.0, 0.25, 2.0, 0.5, 1.0]
SEQUENCE = [0, 0, 0, 1, 1]


def given(ratios: list[float] = RATIOS, staleness: list[int] | None = None) -> CorrectionInput:
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    trainer = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    sequence = torch.tensor(SEQUENCE[: len(ratios)])
    lag = torch.tensor(staleness or [0] * len(ratios))
    return CorrectionInput(trainer, behaviour, sequence, 2, lag)


def near(values: Tensor, expected: list[float]) -> bool:
    return values.tolist() == pytest.approx(expected, rel=1e-12)


def test_nothing_chosen_keeps_everything_at_weight_one() -> None:
    found = compute_correction(given(), CorrectionConfig())
    assert found.weights.tolist() == [1.0] * 5
    assert found.kept.all()


def test_token_tis_weighs_by_the_ratio_up_to_the_cap() -> None:
    found = compute_correction(given(), CorrectionConfig(token_tis=2.5))
    assert near(found.weights, [2.5, 0.25, 2.0, 0.5, 1.0])
    assert found.kept.all()


@pytest.mark.parametrize(("cap", "first"), [(5.0, 2.0), (1.5, 1.5)])
def test_sequence_tis_weighs_all_tokens_by_the_product_up_to_the_cap(
    cap: float, first: float
) -> None:
    found = compute_correction(given(), CorrectionConfig(sequence_tis=cap))
    assert near(found.weights, [first] * 3 + [0.5] * 2)


def test_the_token_mask_is_double_sided() -> None:
    found = compute_correction(given(), CorrectionConfig(token_mask=(0.4, 3.0)))
    assert found.kept.tolist() == [False, False, True, True, True]
    assert found.weights.tolist() == [1.0] * 5


def test_sequence_masks_take_whole_sequences() -> None:
    product = compute_correction(given(), CorrectionConfig(sequence_mask_product=(0.6, 2.1)))
    assert product.kept.tolist() == [True] * 3 + [False] * 2
    geometric = compute_correction(given(), CorrectionConfig(sequence_mask_geometric=(0.6, 1.2)))
    assert geometric.kept.tolist() == [False] * 3 + [True] * 2


def test_a_low_bound_of_zero_bounds_one_side_only() -> None:
    found = compute_correction(given([1e-30, 1.0, 5.0]), CorrectionConfig(token_mask=(0.0, 2.0)))
    assert found.kept.tolist() == [True, True, False]


def test_staleness_weighs_by_a_power_and_multiplies_with_the_ratio() -> None:
    config = CorrectionConfig(staleness_decay=0.5, token_tis=10.0)
    found = compute_correction(given(staleness=[0, 0, 0, 3, 3]), config)
    assert near(found.weights, [4.0, 0.25, 2.0, 0.5 / 8, 1.0 / 8])


def test_the_guards_limit_masks_on_top_of_the_configuration() -> None:
    config = CorrectionConfig(token_mask=(0.3, 10.0))
    assert compute_correction(given(), config).kept.tolist() == [True, False, True, True, True]
    tightened = compute_correction(given(), config, ratio_limit=3.0)
    assert tightened.kept.tolist() == [False, False, True, True, True]
    assert compute_correction(given(), CorrectionConfig(), 1.5).kept.tolist() == [False] * 4 + [
        True
    ]


def test_extreme_ratios_neither_overflow_nor_slip_through() -> None:
    tokens = given([1.0, 1.0, 1.0])
    trainer = torch.tensor([-2.0, -1e5, -math.inf], dtype=torch.float64)
    behaviour = torch.tensor([-1e5, -2.0, -2.0], dtype=torch.float64)
    extreme = CorrectionInput(trainer, behaviour, tokens.sequence, 2, tokens.staleness)
    config = CorrectionConfig(token_tis=2.0, token_mask=(0.1, 10.0))
    found = compute_correction(extreme, config)
    assert found.weights.tolist() == [pytest.approx(2.0), 0.0, 0.0]
    assert not found.kept.any()
    whole = compute_correction(extreme, CorrectionConfig(sequence_tis=5.0))
    assert torch.isfinite(whole.weights).all()


def test_a_logprob_that_is_nan_is_never_masked() -> None:
    tokens = given([float("nan"), 1.0])
    config = CorrectionConfig(
        token_mask=(0.5, 2.0),
        sequence_mask_product=(0.5, 2.0),
        sequence_mask_geometric=(0.5, 2.0),
    )
    assert compute_correction(tokens, config, ratio_limit=2.0).kept.all()


def test_what_depends_on_sequences_and_on_the_trainer_is_known_beforehand() -> None:
    plain, decay = CorrectionConfig(), CorrectionConfig(staleness_decay=0.9)
    assert not needs_trainer_logprobs(plain, None)
    assert not needs_trainer_logprobs(decay, None)
    assert needs_trainer_logprobs(plain, 2.0)
    for name in ("token_tis", "sequence_tis"):
        assert needs_trainer_logprobs(CorrectionConfig.model_validate({name: 2.0}), None)
    for name in ("sequence_mask_product", "sequence_mask_geometric"):
        config = CorrectionConfig.model_validate({name: [0.5, 2.0]})
        assert needs_sequences(config)
        assert needs_trainer_logprobs(config, None)
    assert not needs_sequences(CorrectionConfig(token_tis=2.0, token_mask=(0.5, 2.0)))
    assert needs_sequences(CorrectionConfig(sequence_tis=2.0))
