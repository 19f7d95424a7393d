"""The trainer uses the experts that the engine chose, weighs them by its own router, and counts how
often it would have chosen others."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_common.domain.trajectory import Experts
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.algo.packing import Segments
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import ExpertShape, StepResult, TrainBatch
from tests.support.rank_configs import policy_config
from tests.support.shared_folders import SharedFolders
from tests.support.tiny_ranks import (
    make_batch,
    make_prompted_batch,
    parameters,
    same_bits,
    write_sparse_model,
)

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
REROUTED = ("mismatch/rerouted_tokens", "mismatch/rerouted_choices")


@pytest.fixture(scope="module")
def sparse_folder(shared_folders: SharedFolders, one_thread: None) -> Path:
    return shared_folders.filled_by(write_sparse_model, "sparse-model")


def load(folder: Path, mode: str = "replay", **rank: Any) -> Policy:
    config = PolicyConfig.model_validate(
        {"model": str(folder), "dtype": "float32", "max_model_len": 64, "routing_replay": mode}
    )
    return load_policy(config, RankConfig.model_validate(rank))


@torch.no_grad()
def own_experts(policy: Policy, token_ids: NDArray[np.int32]) -> Experts:
    """Return the experts that the policy's own routers choose."""
    seen: list[Tensor] = []
    body: Any = policy.model.base_model
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, found: seen.append(found[2]))
        for layer in body.layers
    ]
    policy.hidden_states([token_ids])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.uint8)


def with_experts(batch: TrainBatch, policy: Policy, shift: int = 0) -> TrainBatch:
    """The batch with experts of all tokens but the last, each by `shift` from the policy's own."""
    sequences = tuple(
        replace(s, experts=(own_experts(policy, s.token_ids)[:-1] + shift) % EXPERTS)
        for s in batch.sequences
    )
    return replace(batch, sequences=sequences)


def step(policy: Policy, batch: TrainBatch, **rank: Any) -> StepResult:
    """Make one step, by a small multiple of the gradient."""
    # Adam divides a gradient by its own size, rounding errors too; not with this eps.
    settings = OptimizerConfig(lr=0.1).model_copy(update={"eps": 1.0})
    optimizer = Optimizer(policy.named_parameters(), settings, offload=False)
    config = RankConfig.model_validate(rank)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), config)
    return trainer.train_step(batch, 0.1)


def test_the_trainers_own_choices_change_no_bit(sparse_folder: Path) -> None:
    plain, replaying = load(sparse_folder, "off"), load(sparse_folder)
    batch = make_batch(plain)
    assert replaying.routing is not None
    assert replaying.routing.shape == ExpertShape(LAYERS, EXPERTS, CHOSEN)
    one, other = step(plain, batch), step(replaying, with_experts(batch, replaying))
    assert same_bits(parameters(plain), parameters(replaying))
    same = dict.fromkeys(REROUTED, 0.0)
    # Scored behind the update, whose routers would choose others.
    differs = "policy/post_update_kl"
    assert {**one.metrics, **same, differs: other.metrics[differs]} == other.metrics
    assert one.metrics[differs] != other.metrics[differs]


def moe_by_hand(block: Any, states: Tensor, chosen: Tensor) -> Tensor:
    """Return what a layer's experts give, each token's weighed by the softmax of its router."""
    scores = torch.softmax(states @ block.gate.weight.T, -1)
    weights = scores.gather(1, chosen)
    if block.gate.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    rows: list[Tensor] = []
    for state, experts, given in zip(states, chosen, weights, strict=True):
        total = torch.zeros_like(state)
        for expert, weight in zip(experts.tolist(), given, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            down = block.experts.down_proj[expert]
            total = total + weight * (down @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def run_by_hand(policy: Policy, token_ids: NDArray[np.int32], experts: Experts) -> Tensor:
    """Return the hidden states of transformers with each block of experts computed here."""
    model: Any = copy.deepcopy(body_of(policy))
    for layer, block in enumerate(each.mlp for each in model.layers):
        chosen = torch.from_numpy(experts[:, layer].astype(np.int64))

        def forward(states: Tensor, block: Any = block, chosen: Tensor = chosen) -> Tensor:
            return moe_by_hand(block, states[0], chosen)[None]

        block.forward = forward
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).last_hidden_state[0]


def body_of(policy: Policy) -> Any:
    return policy.model.base_model


def test_other_choices_give_what_is_computed_by_hand_and_routers_their_gradients(
    sparse_folder: Path,
) -> None:
    policy = load(sparse_folder)
    ids = np.arange(7, 19, dtype=np.int32)
    chosen = np.random.default_rng(0).permuted(
        np.tile(np.arange(EXPERTS, dtype=np.uint8), (len(ids), LAYERS, 1)), axis=-1
    )[..., :CHOSEN]
    expected = run_by_hand(policy, ids, chosen)
    segments = Segments([ids], experts=[chosen])
    found = policy.segment_states(segments, policy.make_pass(segments))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - policy.hidden_states([ids])).abs().max() > 0.01
    # The copy by hand has parameters of its own.
    found.square().sum().backward()
    body = body_of(policy)
    assert body.layers[1].mlp.gate.weight.grad.abs().max() > 0


def test_tokens_whose_experts_are_not_known_are_routed_by_the_trainer(sparse_folder: Path) -> None:
    policy = load(sparse_folder)
    ids = np.arange(7, 19, dtype=np.int32)
    own = own_experts(policy, ids)
    others = (own + 1) % EXPERTS
    with torch.no_grad():
        segments = Segments([ids, ids], experts=[others[:5], None])
        half = policy.make_pass(segments)
        both = policy.segment_states(segments, half)
        # The second layer of the rest sees other states, so that only the first is known.
        alone = policy.hidden_states([ids])
        assert half is not None
    torch.testing.assert_close(both[len(ids) :], alone, rtol=0, atol=1e-5)
    assert (both[4] - alone[4]).abs().max() > 0.001
    found = half.count_differences()
    assert (found.routed_tokens, found.routed_choices) == (5, 10)
    assert found.rerouted_tokens == 5
    assert policy.make_pass(Segments([ids], experts=[None])) is None


@pytest.mark.parametrize(
    ("gradient_checkpointing", "pack_tokens"),
    [
        ("off", 4096),
        ("selective", 1),
        ("full", 4096),
        pytest.param("off", 1, marks=pytest.mark.slow),
        pytest.param("selective", 4096, marks=pytest.mark.slow),
        pytest.param("full", 1, marks=pytest.mark.slow),
    ],
)
def test_packs_and_recomputed_blocks_replay_the_same(
    pack_tokens: int, gradient_checkpointing: str, sparse_folder: Path
) -> None:
    rank: dict[str, Any] = {
        "pack_tokens": pack_tokens,
        "gradient_checkpointing": gradient_checkpointing,
    }
    plain, tried = load(sparse_folder), load(sparse_folder, **rank)
    batch = with_experts(make_batch(plain), plain, shift=1)
    one, other = step(plain, batch), step(tried, batch, **rank)
    assert one.metrics["mismatch/rerouted_tokens"] > 0.9
    for name, value in one.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for name, value in parameters(plain).items():
        torch.testing.assert_close(parameters(tried)[name], value, rtol=0, atol=1e-6)


def test_a_prompt_is_shared_where_its_experts_are_the_same(sparse_folder: Path) -> None:
    """Sharing a prompt never changes the loss."""
    one, other = (load(sparse_folder, share_prompts=share) for share in (True, False))
    batch = with_experts(make_prompted_batch(), one, shift=1)
    rerouted = [
        replace(s, experts=(s.experts + index % 2) % EXPERTS)  # pyright: ignore[reportOptionalOperand]
        for index, s in enumerate(batch.sequences)
    ]
    shared: list[float] = []
    for tried in (batch, replace(batch, sequences=tuple(rerouted))):
        ours, theirs = (step(policy, tried).metrics for policy in (one, other))
        shared.append(ours["policy/shared_prompt_share"])
        # A shared prompt is routed once.
        for name in theirs.keys() - {"policy/shared_prompt_share", *REROUTED}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    # Of the second batch every other sequence has experts of its own.
    assert shared[0] > shared[1] > 0


def test_measuring_trains_as_without_and_counts(sparse_folder: Path) -> None:
    plain, measuring = load(sparse_folder, "off"), load(sparse_folder, "measure")
    batch = make_batch(plain)
    step(plain, batch)
    reported = step(measuring, with_experts(batch, measuring, shift=1)).metrics
    assert same_bits(parameters(plain), parameters(measuring))
    # Of four experts two: shifted by one, the pair is the same for none.
    assert reported["mismatch/rerouted_choices"] == 1.0


def test_the_proximal_scores_and_those_after_the_update_replay_too(sparse_folder: Path) -> None:
    policy = load(sparse_folder)
    batch = with_experts(make_batch(policy), policy, shift=1)
    config = AlgorithmConfig.model_validate({"proximal": "trainer"})
    optimizer = Optimizer(policy.named_parameters(), OptimizerConfig(), offload=False)
    reported = Trainer(policy, optimizer, config, RankConfig()).train_step(batch, 0.0).metrics
    # With a rate of 0 neither differs from what the gradient was computed with.
    assert reported["policy/clip_ratio"] == 0.0
    assert reported["policy/updates"] == 1.0
    assert reported["policy/post_update_kl"] < 1e-9


def test_the_reference_policy_routes_by_itself(sparse_folder: Path) -> None:
    """A policy that replays other experts is away from the reference that it was copied from."""
    policy = load(sparse_folder)
    batch = make_batch(policy)
    config = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    for shift, far in ((0, False), (1, True)):
        optimizer = Optimizer(policy.named_parameters(), OptimizerConfig(), offload=False)
        trainer = Trainer(policy, optimizer, config, RankConfig())
        reported = trainer.train_step(with_experts(batch, policy, shift), 0.0).metrics
        assert (reported["policy/kl"] > 1e-4) == far


def test_a_dense_model_is_refused(model_folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"policy\.routing_replay: .* has no known routers.*\"off\""
    ):
        load(model_folder)


def test_adapters_are_trained_with_the_engines_experts_too(sparse_folder: Path) -> None:
    """Under them lies the reference policy, which routes by itself."""
    config = policy_config(sparse_folder, routing_replay="replay")
    policy = load_policy(config, RankConfig(), lora=LoraConfig(rank=4))
    batch = make_batch(policy)
    kl = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1}})
    for shift, far in ((0, False), (1, True)):
        optimizer = Optimizer(policy.trained_parameters(), OptimizerConfig())
        trainer = Trainer(policy, optimizer, kl, RankConfig())
        reported = trainer.train_step(with_experts(batch, policy, shift), 0.0).metrics
        assert (reported["policy/kl"] > 1e-4) == far
        assert (reported["mismatch/rerouted_choices"] > 0.9) == far
