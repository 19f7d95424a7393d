"""A prompt that is computed once for several sequences trains as one that is computed for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from flotilla_learner.algo.packing import make_pack_layout
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import Pack, PackTargets, RowCluster, RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.support.rank_configs import EVERYTHING, policy_config
from tests.support.tiny_ranks import (
    VOCAB,
    make_prompted_batch,
    parameters,
    same_bits,
    write_sparse_model,
)

STEPS = 3
# With the eps below an update is the gradient times this rate. A larger one multiplies rounding
# errors in what is scored after it.
RATE = 0.1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
MORE_HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 4}


def write_configured(config: PreTrainedConfig) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return write


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "experts": write_sparse_model,
    # Windows that end within the prompt, at its end, and beyond it.
    "mistral": write_configured(MistralConfig(**SIZES, sliding_window=6)),
    "gemma": write_configured(
        Gemma3TextConfig(
            **SIZES, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "heads": write_configured(LlamaConfig(**MORE_HEADS)),
}
ALGORITHMS: Mapping[str, dict[str, object]] = {
    "plain": {},
    "everything": EVERYTHING,
}


@dataclass(frozen=True)
class Trained:
    metrics: list[Mapping[str, float]]
    weights: dict[str, torch.Tensor]


def train(
    folder: Path, algorithm: str = "plain", dtype: str = "float32", **rank: object
) -> Trained:
    """Make some steps on groups with prompts of their own."""
    values = {"pack_tokens": 256, "head_chunk": 16, **rank}
    config = RankConfig.model_validate(values)
    policy = load_policy(policy_config(folder, dtype=dtype), config)
    # Adam divides a gradient by its own size, rounding errors too; not with this eps.
    settings = OptimizerConfig(lr=RATE).model_copy(update={"eps": 1.0})
    adamw = Optimizer(policy.named_parameters(), settings)
    chosen = AlgorithmConfig.model_validate(ALGORITHMS[algorithm])
    trainer = Trainer(policy, adamw, chosen, config)
    found = [
        trainer.train_step(make_prompted_batch(step=step), RATE).metrics
        for step in range(1, STEPS + 1)
    ]
    critic = trainer.critic.state_tensors() if trainer.critic is not None else {}
    return Trained(found, {**parameters(policy), **critic})


def check_equal(shared: Trained, alone: Trained) -> None:
    for ours, theirs in zip(shared.metrics, alone.metrics, strict=True):
        assert ours["policy/shared_prompt_share"] > 0.35
        assert theirs["policy/shared_prompt_share"] == 0
        for name in theirs.keys() - {"policy/shared_prompt_share"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    for name, value in alone.weights.items():
        torch.testing.assert_close(shared.weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_loss_gradient_and_weights_are_those_without_sharing(
    model_folder: Path, algorithm: str
) -> None:
    shared, alone = (train(model_folder, algorithm, share_prompts=on) for on in (True, False))
    check_equal(shared, alone)


@pytest.mark.parametrize("model", list(MODELS))
def test_so_are_those_of_windows_experts_and_heads_of_their_own(model: str, tmp_path: Path) -> None:
    folder = MODELS[model](tmp_path / "model")
    check_equal(*(train(folder, share_prompts=on) for on in (True, False)))


def test_recomputed_activations_change_no_bit_of_it(model_folder: Path) -> None:
    kept = train(model_folder, gradient_checkpointing="off")
    for choice in ("selective", "full"):
        again = train(model_folder, gradient_checkpointing=choice)
        assert kept.metrics == again.metrics
        assert same_bits(kept.weights, again.weights)


@pytest.mark.parametrize("model", [pytest.param("mistral", marks=pytest.mark.slow), "gemma"])
def test_neither_do_they_with_windows(model: str, tmp_path: Path) -> None:
    folder = MODELS[model](tmp_path / "model")
    kept, again = (train(folder, gradient_checkpointing=each) for each in ("off", "selective"))
    assert kept.metrics == again.metrics
    assert same_bits(kept.weights, again.weights)


def test_two_runs_give_the_same_bits(model_folder: Path) -> None:
    first, second = (train(model_folder) for _ in range(2))
    assert first.metrics == second.metrics
    assert same_bits(first.weights, second.weights)


def test_bfloat16_is_as_near_as_without_sharing(model_folder: Path) -> None:
    exact = train(model_folder)
    for on in (True, False):
        rough = train(model_folder, dtype="bfloat16", share_prompts=on)
        for ours, theirs in zip(rough.metrics, exact.metrics, strict=True):
            assert (ours["policy/shared_prompt_share"] > 0.35) == on
            assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=0.1)


def test_the_share_is_what_is_not_computed(model_folder: Path) -> None:
    batch = make_prompted_batch(groups=2, size=4, prompt=24)
    policy = load_policy(policy_config(model_folder), RankConfig())
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig())
    metrics = (
        Trainer(policy, adamw, AlgorithmConfig(), RankConfig()).train_step(batch, 1e-3).metrics
    )
    # Nothing after the last policy token is computed either way.
    tokens = sum(int(np.flatnonzero(s.policy_mask)[-1]) + 1 for s in batch.sequences)
    assert metrics["policy/shared_prompt_share"] == pytest.approx(2 * 3 * 24 / tokens)


def test_scores_are_those_of_each_sequence_alone(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    rows = rows_of(make_prompted_batch())
    packer = RowPacker(policy, 4096, Replicas())
    assert any(cluster.prefix for pack in packer.iter_packs(rows) for cluster in pack.clusters)
    together = score_rows(policy, rows, packer, chunk=64)
    for row in rows:
        alone = score_rows(policy, [row], packer, chunk=64)
        np.testing.assert_allclose(together[row.index], alone[row.index], rtol=1e-6, atol=1e-5)


def test_models_whose_packs_are_not_exact_share_nothing(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    assert policy.shares_prompts
    rows = rows_of(make_prompted_batch())
    for other in (
        load_policy(policy_config(model_folder), RankConfig(share_prompts=False)),
        replace(policy, packable=False, shares_prompts=False),
    ):
        assert not other.shares_prompts
        packs = list(RowPacker(other, 4096, Replicas()).iter_packs(rows))
        assert all(pack.row_tokens == sum(pack.segments.lengths) for pack in packs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_computes_shared_prompts_otherwise_is_found_out(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Such a model makes its own positions, or its attention sees no parent."""
    kind: Any = type(load_policy(policy_config(model_folder), RankConfig()).model.base_model)
    plain = kind.forward

    def without_parents(self: object, **given: Any) -> object:
        places = given.get("segment_places")
        if places is not None:
            given["segment_places"] = replace(places, parents=(None,) * len(places.parents))
        return plain(self, **given)

    monkeypatch.setattr(kind, "forward", without_parents)
    policy = load_policy(policy_config(model_folder, dtype=dtype), RankConfig())
    assert policy.packable
    assert not policy.shares_prompts


def rows_of(batch: TrainBatch) -> list[Row]:
    return [Row.from_sequence(index, s) for index, s in enumerate(batch.sequences)]


@st.composite
def clusters(draw: st.DrawFn) -> list[RowCluster]:
    """Clusters of rows whose every token is a number of its own, but for shared ones."""
    found: list[RowCluster] = []
    token = 0
    for _ in range(draw(st.integers(1, 4))):
        members = draw(st.integers(1, 4))
        prefix = draw(st.integers(1, 6)) if members > 1 else 0
        shared = list(range(token, token := token + prefix))
        rows: list[Row] = []
        for _ in range(members):
            own = list(range(token, token := token + draw(st.integers(2, 6))))
            ids = np.array([*shared, *own], np.int32)
            mask = np.zeros(len(ids), np.bool_)
            mask[max(prefix, 1) :] = draw(
                st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))
            )[max(prefix, 1) :]
            mask[-1] = True
            rows.append(Row.from_sequence(len(rows), sequence_of(ids, mask)))
        found.append(RowCluster(rows, prefix))
    return found


def sequence_of(ids: np.ndarray, mask: np.ndarray) -> TrainSequence:
    logprobs = np.zeros(len(ids), np.float32)
    return TrainSequence("g", 0, 0.0, ids, mask, logprobs, 1.0, 0)


@given(clusters())
def test_every_token_of_every_row_lies_where_its_position_says(found: list[RowCluster]) -> None:
    """A row is its prefix and its segment, and each policy token is predicted by the one before."""
    pack = Pack(found)
    segments = pack.segments
    layout = make_pack_layout(segments.lengths, segments.parents)
    tokens = np.concatenate(segments.token_ids)
    assert len(tokens) == layout.offsets[-1] == len(layout.position_ids)
    parents = layout.parents
    rows = [i for i in range(len(parents)) if i not in parents]
    for segment, row in zip(rows, pack.rows, strict=True):
        chain = [i for i in (parents[segment], segment) if i is not None]
        places = np.concatenate([np.arange(*layout.offsets[i : i + 2]) for i in chain])
        assert tokens[places].tolist() == row.token_ids.tolist()
        assert layout.position_ids[places].tolist() == list(range(len(places)))
    targets = PackTargets.from_pack(pack, torch.device("cpu"))
    before = np.concatenate([row.token_ids[row.positions] for row in pack.rows])
    assert tokens[targets.positions.numpy()].tolist() == before.tolist()
    assert pack.row_tokens == sum(len(row.token_ids) for row in pack.rows)


def test_ranks_compute_every_row_once_and_groups_stay_together(model_folder: Path) -> None:
    policy: Policy = load_policy(policy_config(model_folder), RankConfig())
    rows = rows_of(make_prompted_batch(groups=4, size=4))
    for count in (1, 2, 4, 3):
        shares = [
            list(RowPacker(policy, 4096, Replicas(index, count)).iter_packs(rows))
            for index in range(count)
        ]
        computed = [row.index for packs in shares for pack in packs for row in pack.rows]
        assert sorted(computed) == list(range(len(rows)))
        if count != 3:
            groups = [{row.index // 4 for pack in packs for row in pack.rows} for packs in shares]
            assert sum(len(own) for own in groups) == 4
