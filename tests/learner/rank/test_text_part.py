"""Published multimodal models train on text: the ranks hold the text part of the published class,
and an export puts the other parts back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, PreTrainedModel

from flotilla_common.models.multimodal_models import TRAINED_TYPES, other_parts
from flotilla_learner.checkpoints.export import export_adapters, export_model
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.adapter_files import BaseRecord, check_mergeable
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.initial_weights import FileTensors, open_initial_weights
from flotilla_learner.rank.model import Policy, score_tokens
from flotilla_learner.rank.model_loading import ModelError, find_own_files, read_model
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.split_loading import has_all_tensors
from tests.support.checkpoints import write_checkpoint
from tests.support.multimodal_models import KINDS, make_multimodal
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import YARN, make_batch, make_trainer, same_bits

# The forms of names in files: those of the class, those of a nested model, and no name for it.
NAMED = ("qwen3_vl", "mistral3", "qwen2_5_vl")
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja")


def make_folder(tmp_path: Path, kind: str) -> tuple[Path, PreTrainedModel]:
    return tmp_path / "base", make_multimodal(tmp_path / "base", kind)


def score(policy: Policy) -> np.ndarray:
    return score_tokens(policy, canary_token_ids(policy.vocabulary), chunk=64)


@torch.no_grad()
def reference(model: Any) -> np.ndarray:
    """Return the same by a whole model, from ids alone."""
    ids = torch.from_numpy(canary_token_ids(model.config.text_config.vocab_size).astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1).numpy()


def load_whole(folder: Path) -> Any:
    """Return the published class with all of its parts, and no random number in it."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    model, loading = loaded
    assert not any(loading.values())
    return model.eval()


def read_raw(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def pick(tensors: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("kind", TRAINED_TYPES)
def test_on_text_it_is_the_whole_model_and_an_export_is_again(kind: str, tmp_path: Path) -> None:
    folder, whole = make_folder(tmp_path, kind)
    for name in PROCESSORS:
        (folder / name).write_text("{}")
    policy, optimizer, trainer = make_trainer(folder)
    np.testing.assert_allclose(score(policy), reference(whole), rtol=0, atol=1e-5)
    text = {name for name in dict(whole.named_parameters()) if name in policy.named_parameters()}
    assert text == policy.named_parameters().keys()
    assert all(".language_model." in name or name.startswith("lm_head.") for name in text)
    states = [*policy.model.parameters(), *policy.model.buffers()]
    assert sum(each.numel() for each in states) < sum(each.numel() for each in whole.parameters())
    trainer.train_step(make_batch(step=1), lr=1e-2)
    write_checkpoint(tmp_path / "saved", policy, optimizer, 1)
    trained = score(policy)
    assert np.abs(trained - reference(whole)).max() > 1e-2
    config = policy_config(folder)
    resumed = load_policy(config, RankConfig(), tmp_path / "saved")
    assert np.array_equal(score(resumed), trained)
    out = tmp_path / "out"
    export_model(tmp_path / "saved", folder, config, out)
    np.testing.assert_allclose(reference(load_whole(out)), trained, rtol=0, atol=1e-5)
    before, after = read_raw(folder), read_raw(out)
    kept = other_parts(before)
    assert kept and same_bits(pick(before, kept), pick(after, kept))
    published, written = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert published == written
    assert all((out / name).read_text() == "{}" for name in PROCESSORS)


def test_every_type_that_is_trained_is_tried() -> None:
    assert set(TRAINED_TYPES) <= KINDS.keys()


@pytest.mark.parametrize("kind", NAMED)
def test_its_weights_are_found_in_the_files_one_by_one(kind: str, tmp_path: Path) -> None:
    folder, whole = make_folder(tmp_path, kind)
    config = policy_config(folder)
    model = read_model(config)
    assert has_all_tensors(model, find_own_files(config))
    initial = open_initial_weights(config, [name for name, _ in model.named_parameters()])
    assert isinstance(initial, FileTensors)
    own = dict(whole.named_parameters())
    assert same_bits(dict(initial), {name: own[name].detach() for name in initial})


@pytest.mark.parametrize("kind", NAMED)
def test_adapters_are_merged_beside_parts_that_keep_their_bits(kind: str, tmp_path: Path) -> None:
    folder, whole = make_folder(tmp_path, kind)
    whole.bfloat16().save_pretrained(folder)
    before = read_raw(folder)
    policy, optimizer, trainer = make_trainer(folder, lora=LoraConfig(rank=4, alpha=8))
    config = policy_config(folder)
    check_mergeable(policy, config)
    trainer.train_step(make_batch(step=1), lr=1e-2)
    record = BaseRecord.of_policy(policy, config)
    write_checkpoint(tmp_path / "saved", policy, optimizer, 1, record)
    out = tmp_path / "out"
    export_model(tmp_path / "saved", folder, config, out)
    trained = score(policy)
    assert np.abs(trained - reference(whole.float())).max() > 1e-3
    np.testing.assert_allclose(reference(load_whole(out)), trained, rtol=0, atol=1e-5)
    after = read_raw(out)
    assert after.keys() == before.keys()
    kept = other_parts(before)
    assert same_bits(pick(before, kept), pick(after, kept))
    export_adapters(tmp_path / "saved", folder, tmp_path / "adapters")
    adapted = PeftModel.from_pretrained(load_whole(folder), str(tmp_path / "adapters"))
    np.testing.assert_allclose(reference(adapted), trained, rtol=0, atol=1e-5)


def test_its_rope_is_scaled_as_configured_and_exported_so(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path, "mistral3")
    config = policy_config(folder, rope_scaling=YARN)
    policy, optimizer, _ = make_trainer(folder)
    scaled = load_policy(config, RankConfig())
    assert not np.array_equal(score(policy), score(scaled))
    write_checkpoint(tmp_path / "saved", scaled, optimizer, 1)
    export_model(tmp_path / "saved", folder, config, tmp_path / "out")
    np.testing.assert_allclose(
        reference(load_whole(tmp_path / "out")), score(scaled), rtol=0, atol=1e-5
    )


def test_another_multimodal_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path, "qwen3_vl_moe")
    with pytest.raises(ModelError) as caught:
        read_model(policy_config(folder))
    assert "'qwen3_vl_moe'" in str(caught.value) and len(str(caught.value)) < 600


def test_its_routers_follow_the_engine(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path, "qwen3_5_moe")
    policy = load_policy(policy_config(folder, routing_replay="replay"), RankConfig())
    assert policy.routing is not None
    assert policy.routing.shape.layers == 2
