"""Scores under other weights, without a second copy of the model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.initial_weights import open_initial_weights
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.score_comparison import swapped_weights
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import TrainBatch
from tests.support.rank_configs import policy_config
from tests.support.tensor_memory import PeakTensorBytes
from tests.support.tiny_ranks import VOCAB, changed, make_batch, parameters, same_bits

LAYERS = 12


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one block is a small part, and so is a pass through it."""
    folder = tmp_path_factory.mktemp("deep")
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Published:
    """A policy in bfloat16 at version 1, whose version 0 is in a slot."""

    def __init__(self, config: PolicyConfig, folder: Path) -> None:
        self.config = config
        self.policy = load_policy(config, RankConfig(pack_tokens=64, head_chunk=16))
        self.first = parameters(self.policy)
        named = self.policy.named_parameters()
        self.slots = WeightSlots(named, torch.bfloat16, folder, "run")
        self.slots.write_version(0)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in named.values():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.slots.write_version(1)

    def compare(self, batch: TrainBatch, *, diagnose: bool) -> int:
        """Return the most bytes of tensors that the command made and held at once."""
        rank = RankConfig(pack_tokens=64, head_chunk=16)
        command = CompareCommand(self.policy, self.slots, self.config, rank)
        with PeakTensorBytes() as memory:
            found = command.run_comparison(batch, 1, diagnose=diagnose)
        assert (len(found.hypotheses) > 3 * LAYERS) == diagnose
        assert found.versions.keys() == {s.staleness ^ 1 for s in batch.sequences}
        return memory.peak


@pytest.fixture
def published(deep_folder: Path, tmp_path: Path) -> Published:
    return Published(policy_config(deep_folder, dtype="bfloat16"), tmp_path)


def tensor_bytes(policy: Policy) -> int:
    return sum(parameter.nbytes for parameter in policy.named_parameters().values())


def stale(batch: TrainBatch) -> TrainBatch:
    return changed(batch, staleness=1)


def newest(batch: TrainBatch) -> TrainBatch:
    return batch


@pytest.mark.parametrize(("change", "diagnose"), [(stale, False), (newest, True)])
def test_neither_audit_nor_diagnosis_holds_a_second_model(
    published: Published, change: Callable[[TrainBatch], TrainBatch], diagnose: bool
) -> None:
    before = parameters(published.policy)
    batch = change(replace(make_batch(groups=1, size=2), step=2))
    peak = published.compare(batch, diagnose=diagnose)
    assert peak < 0.4 * tensor_bytes(published.policy)
    assert same_bits(parameters(published.policy), before)


@torch.no_grad()
def states(policy: Policy) -> Tensor:
    rows = [sequence.token_ids for sequence in make_batch(groups=1).sequences]
    return torch.cat([policy.hidden_states(rows) @ policy.head.to(policy.compute_dtype).T])


@pytest.mark.parametrize("kind", ["model_folder", "untied_folder"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_weights_give_the_bits_of_a_model_that_has_them(
    kind: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    config = policy_config(request.getfixturevalue(kind), dtype=dtype)
    policy, other = (load_policy(config, RankConfig()) for _ in range(2))
    with torch.no_grad():
        for parameter in policy.named_parameters().values():
            parameter.mul_(1.1)
    own = states(policy)
    with swapped_weights(policy, open_initial_weights(config, list(policy.named_parameters()))):
        assert torch.equal(states(policy), states(other))
    assert torch.equal(states(policy), own)
    assert not torch.equal(states(other), own)


def test_what_breaks_off_a_pass_leaves_the_models_own_weights(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    before, own = parameters(policy), states(policy)
    blocks = policy.model.model.layers
    handle = blocks[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), swapped_weights(policy, before):
        states(policy)
    handle.remove()
    assert same_bits(parameters(policy), before)
    assert torch.equal(states(policy), own)
