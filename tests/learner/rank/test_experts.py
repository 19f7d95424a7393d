"""Experts are computed by torch's grouped matrix product, as exactly as one after another."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, write_sparse_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_model(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(policy_config(folder), RankConfig())


def compute_pack(policy: Policy, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a pack's states, and the gradients of a sum of them."""
    policy.model.set_experts_implementation(implementation)
    states = policy.hidden_states([s.token_ids for s in make_batch().sequences])
    # The head comes after the states.
    named = dict(policy.model.base_model.named_parameters())
    pull = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    slopes = torch.autograd.grad((states * pull).sum(), list(named.values()))
    return states.detach(), dict(zip(named, slopes, strict=True))


def test_a_policy_is_loaded_with_the_grouped_product(policy: Policy) -> None:
    assert policy.model.get_experts_implementation() == {"": "grouped_mm"}


@pytest.mark.parametrize("other", ["eager", "batched_mm"])
def test_it_gives_the_states_and_gradients_of_experts_one_by_one(
    policy: Policy, other: str
) -> None:
    states, slopes = compute_pack(policy, "grouped_mm")
    expected, own = compute_pack(policy, other)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    assert slopes.keys() == own.keys()
    assert any("experts" in name for name in slopes)
    for name, slope in slopes.items():
        scale = float(own[name].abs().max())
        torch.testing.assert_close(slope / scale, own[name] / scale, rtol=0, atol=1e-5)


def test_it_computes_in_bfloat16_where_the_policy_does(
    folder: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast leaves the grouped product alone: it would be in the masters' float32."""
    low = load_policy(policy_config(folder, dtype="bfloat16"), RankConfig())
    kinds = set[tuple[torch.dtype, torch.dtype]]()
    product = vars(moe)["_grouped_mm"]

    def noted(given: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        found = product(given, weight, offs)
        kinds.add((weight.dtype, found.dtype))
        return found

    monkeypatch.setattr(moe, "_grouped_mm", noted)
    states, slopes = compute_pack(low, "grouped_mm")
    assert kinds == {(torch.bfloat16, torch.bfloat16)}
    expected, own = compute_pack(low, "eager")
    torch.testing.assert_close(states.float(), expected.float(), rtol=0, atol=0.1)
    for name, slope in slopes.items():
        assert slope.dtype == torch.float32
        assert torch.cosine_similarity(slope.flatten(), own[name].flatten(), dim=0) > 0.99, name
    kinds.clear()
    compute_pack(policy, "grouped_mm")
    assert kinds == {(torch.float32, torch.float32)}
