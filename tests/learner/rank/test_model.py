import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flotilla_learner.algo.logprob_head import fused_policy_loss
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import attention
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy, score_tokens
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_checks import check_attention
from flotilla_learner.rank.policy_loading import load_policy, prepare_policy
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import VOCAB, YARN, reference_logprobs


def own_logprobs(folder: Path, ids: np.ndarray, **changes: object) -> np.ndarray:
    """Return logprobs by transformers alone, with its own attention."""
    config = Qwen3Config.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    model = Qwen3ForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    policy = Policy(model, config, torch.float32, torch.device("cpu"), packable=False)
    return reference_logprobs(policy, ids, 1.0)


def with_rope(folder: Path, scaling: dict[str, object]) -> Path:
    """A copy of the model with this scaling in its config."""
    copy = folder.with_name(f"{folder.name}-{scaling['rope_type']}")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **scaling}
    config["max_position_embeddings"] = 64 if scaling["rope_type"] == "dynamic" else 128
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture
def long_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, 120).astype(np.int32)


@pytest.mark.parametrize("kind", ["model_folder", "untied_folder"])
def test_logprobs_are_those_of_transformers(
    kind: str, request: pytest.FixtureRequest, long_ids: np.ndarray
) -> None:
    folder = request.getfixturevalue(kind)
    policy = load_policy(policy_config(folder), RankConfig())
    ours = score_tokens(policy, long_ids, chunk=32)
    np.testing.assert_allclose(ours, own_logprobs(folder, long_ids), atol=2e-5)


def test_yarn_is_laid_over_the_models_own_rope(model_folder: Path, long_ids: np.ndarray) -> None:
    policy = load_policy(policy_config(model_folder, rope_scaling=YARN), RankConfig())
    ours = score_tokens(policy, long_ids, chunk=32)
    rope = {**YARN, "rope_theta": 10000.0}
    np.testing.assert_allclose(
        ours, own_logprobs(model_folder, long_ids, rope_parameters=rope), atol=2e-5
    )
    assert np.abs(ours - own_logprobs(model_folder, long_ids)).max() > 0.01


def test_a_pack_computes_what_its_sequences_do_alone(model_folder: Path) -> None:
    policy = load_policy(policy_config(model_folder), RankConfig())
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (5, 1, 33, 12)]
    with torch.no_grad():
        packed = policy.hidden_states(rows)
        alone = torch.cat([policy.hidden_states([row]) for row in rows])
    assert policy.packable
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_a_long_sequence_leaves_the_longrope_of_a_short_one_alone(
    model_folder: Path, long_ids: np.ndarray
) -> None:
    """Its angles are chosen by the largest position of a row, so no two may share one."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    folder = with_rope(model_folder, {**scaling, "original_max_position_embeddings": 64})
    policy = load_policy(policy_config(folder), RankConfig())
    short = Row(0, long_ids[:40], np.arange(39), np.zeros(39, np.float32), 1.0, 0)
    long = Row(1, long_ids, np.arange(119), np.zeros(119, np.float32), 1.0, 0)
    packer = RowPacker(policy, 4096, Replicas())
    together = score_rows(policy, [short, long], packer, chunk=64)
    alone = score_tokens(policy, short.token_ids, chunk=64)
    np.testing.assert_array_equal(together[0], alone)
    assert not policy.packable


def test_dynamic_rope_is_refused(model_folder: Path) -> None:
    folder = with_rope(model_folder, {"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelError, match="is scaled dynamically"):
        load_policy(policy_config(folder), RankConfig())


def test_attention_within_chunks_is_refused(model_folder: Path) -> None:
    config = Qwen3Config.from_pretrained(model_folder)
    check_attention(config)
    config.layer_types, config.attention_chunk_size = ["chunked_attention", "full_attention"], 64
    with pytest.raises(ModelError, match="attend within chunks of 64 tokens"):
        check_attention(config)


def test_sliding_windows_are_kept(tmp_path: Path, model_folder: Path) -> None:
    config = Qwen3Config.from_pretrained(model_folder)
    config.use_sliding_window, config.sliding_window = True, 6
    config.layer_types = ["full_attention", "sliding_attention"]
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    ids = np.arange(40, dtype=np.int32)
    policy = load_policy(policy_config(tmp_path), RankConfig())
    np.testing.assert_allclose(
        score_tokens(policy, ids, chunk=32), own_logprobs(tmp_path, ids), atol=2e-5
    )


def test_a_tied_head_is_one_parameter(model_folder: Path, untied_folder: Path) -> None:
    tied = load_policy(policy_config(model_folder), RankConfig()).named_parameters()
    untied = load_policy(policy_config(untied_folder), RankConfig()).named_parameters()
    assert "lm_head.weight" not in tied
    assert set(untied) - set(tied) == {"lm_head.weight"}


def test_bfloat16_computes_roughly_and_keeps_float32_parameters(model_folder: Path) -> None:
    exact = load_policy(policy_config(model_folder), RankConfig())
    rough = load_policy(policy_config(model_folder, dtype="bfloat16"), RankConfig())
    ids = canary_token_ids(VOCAB)
    difference = np.abs(
        score_tokens(exact, ids, chunk=32) - score_tokens(rough, ids, chunk=32)
    ).max()
    assert {p.dtype for p in rough.named_parameters().values()} == {torch.float32}
    assert 0 < difference < 0.3


def test_the_canary_depends_on_the_vocabulary_alone() -> None:
    ids = canary_token_ids(151_936)
    assert ids.tolist() == canary_token_ids(151_936).tolist()
    assert len(set(ids.tolist())) == 32
    assert ids.min() >= 0
    assert ids.max() < 151_936


def test_a_head_that_is_more_than_a_matrix_is_refused(model_folder: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa")
    head = nn.Linear(32, VOCAB)
    nn.init.normal_(head.bias)
    model.lm_head = head
    with pytest.raises(ModelError, match="more than a matrix product"):
        prepare_policy(model, torch.float32, RankConfig())


@pytest.mark.parametrize(
    "config",
    [GraniteConfig(logits_scaling=8.0, embedding_multiplier=12.0), CohereConfig(logit_scale=0.25)],
    ids=["divided", "multiplied"],
)
def test_scaled_logits_are_scored_and_trained_as_transformers_scales_them(
    config: PreTrainedConfig, long_ids: np.ndarray
) -> None:
    model = make_scaled(config)
    policy = prepare_policy(model, torch.float32, RankConfig())
    expected = reference_logprobs(policy, long_ids, 1.0)
    np.testing.assert_allclose(score_tokens(policy, long_ids, chunk=32), expected, atol=2e-5)
    hidden = policy.hidden_states([long_ids])[:-1]
    targets = torch.from_numpy(long_ids[1:].astype(np.int64))
    ones = torch.ones(len(targets))
    fused, _, _ = fused_policy_loss(
        hidden, policy.head, targets, ones, lambda logprobs, _: -logprobs, chunk=32
    )
    ours = torch.autograd.grad(fused, list(model.parameters()))
    logits = model(torch.from_numpy(long_ids.astype(np.int64))[None], use_cache=False).logits[0]
    whole = nn.functional.cross_entropy(logits[:-1], targets, reduction="sum")
    for mine, own in zip(ours, torch.autograd.grad(whole, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-4)


def make_scaled(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model of the architecture, as small as the others."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    changed: dict[str, Any] = {**config.to_dict(), **sizes, **heads, "initializer_range": 0.2}
    settings = type(config)(**changed)
    attention.register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, attn_implementation=attention.NAME)


def test_pickled_weights_are_refused_unread(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ModelError, match=r"pickled weights \(pytorch_model\.bin\).*convert it"):
        load_policy(policy_config(tmp_path), RankConfig())
    # Beside safetensors it is not looked at.
    shutil.copy(model_folder / "model.safetensors", tmp_path)
    load_policy(policy_config(tmp_path), RankConfig())


def test_damaged_weights_are_named(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    whole = (model_folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-1], b"\xff" * 64, struct.pack("<Q", 2**31) + whole[8:]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"policy\.model .* cannot be loaded"):
            load_policy(policy_config(tmp_path), RankConfig())


def test_a_model_that_lacks_weights_is_not_made_up(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj"):
        load_policy(policy_config(tmp_path), RankConfig())


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"policy\.model .*nowhere"):
        load_policy(policy_config(tmp_path / "nowhere"), RankConfig())
