"""Adapters of a checkpoint as a whole model, and by themselves."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.checkpoints.export import ExportError, export_adapters, export_model
from flotilla_learner.checkpoints.number_formats import decode_numbers, encode_numbers
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.model import Policy
from flotilla_learner.run_files.rank_record import RECORD_FILE
from tests.support.checkpoints import write_checkpoint
from tests.support.rank_configs import policy_config
from tests.support.split_checkpoints import split_checkpoint
from tests.support.tiny_ranks import make_batch, make_trainer, reference_logprobs, same_bits

LORA = LoraConfig(rank=4, alpha=8)
Saved = tuple[Path, Policy, PolicyConfig]
Save = Callable[..., Saved]


@pytest.fixture
def save(tmp_path: Path, model_folder: Path, untied_folder: Path) -> Save:
    """Save the adapters of a policy after three steps; the model is in files of 20 kB."""

    def save_checkpoint(*, tied: bool = True, stored: str = "float32", dtype: str) -> Saved:
        base = tmp_path / "base"
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_folder if tied else untied_folder, dtype=getattr(torch, stored)
        )
        model.save_pretrained(base, max_shard_size="20KB")
        (base / "tokenizer.json").write_text("{}")
        policy, optimizer, trainer = make_trainer(base, lora=LORA, dtype=dtype)
        for step in (1, 2, 3):
            trainer.train_step(make_batch(step=step), lr=1e-2)
        config = policy_config(base, dtype=dtype)
        record = BaseRecord.of_policy(policy, config)
        write_checkpoint(tmp_path / "saved", policy, optimizer, 3, record)
        return tmp_path / "saved", policy, config

    return save_checkpoint


@pytest.mark.parametrize(
    ("tied", "stored", "dtype"),
    [
        (True, "float32", "float32"),
        (False, "bfloat16", "bfloat16"),
        (True, "float32", "bfloat16"),
        (False, "float16", "float32"),
    ],
)
def test_the_merged_model_is_what_engines_were_given(
    tmp_path: Path, save: Save, tied: bool, stored: str, dtype: str
) -> None:
    saved, policy, config = save(tied=tied, stored=stored, dtype=dtype)
    export_model(saved, Path(config.model), config, tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    own = policy.named_parameters()
    assert found.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            given = policy.published_tensor(name, parameter).to(policy.compute_dtype)
            assert found[name].dtype == given.dtype
            # Two libraries add up in another order; bfloat16 shows it in its last place, if at all.
            bound = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
            torch.testing.assert_close(found[name], given, rtol=bound, atol=1e-6)
            if dtype == "bfloat16":
                assert (found[name] != given).double().mean() < 1e-3
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert str(model.dtype) == f"torch.{dtype}"
    assert (tmp_path / "model" / "tokenizer.json").exists()
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "model", capture_output=True, check=False
    )
    assert done.returncode == 0


def test_the_adapters_alone_are_what_peft_loads(tmp_path: Path, save: Save) -> None:
    saved, policy, config = save(dtype="float32")
    export_adapters(saved, Path(config.model), tmp_path / "adapters")
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "SHA256SUMS",
    }
    base: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    loaded: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    assert loaded.peft_config["default"].base_model_name_or_path == config.model
    ids = canary_token_ids(policy.vocabulary)
    whole = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = loaded.merge_and_unload()(whole).logits[0, :-1].log_softmax(-1)
    found = logits.gather(1, whole[0, 1:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(found, reference_logprobs(policy, ids, 1.0), rtol=0, atol=1e-4)


def test_adapters_in_parts_of_two_ranks_are_merged_as_those_of_one(
    tmp_path: Path, save: Save
) -> None:
    saved, _, config = save(dtype="float32")
    parts = split_checkpoint(saved, tmp_path / "parts", 2)
    found = list[dict[str, torch.Tensor]]()
    for checkpoint in (saved, parts):
        out = tmp_path / f"model-of-{checkpoint.name}"
        export_model(checkpoint, Path(config.model), config, out)
        found.append(load_file(out / "model.safetensors"))
        export_adapters(checkpoint, Path(config.model), out)
        found.append(load_file(out / "adapter_model.safetensors"))
    assert same_bits(found[2], found[0])
    assert same_bits(found[3], found[1])


def test_a_model_whose_files_name_layers_otherwise_is_not_merged(
    tmp_path: Path, save: Save
) -> None:
    saved, _, config = save(dtype="float32")
    for path in (*saved.glob("*.safetensors"), saved / RECORD_FILE):
        renamed = path.read_bytes().replace(b"layers.0.mlp.up_proj", b"layers.0.mlp.UP_proj")
        path.write_bytes(renamed)
    with pytest.raises(
        ExportError, match=r"another name for model\.layers\.0\.mlp\.UP_proj.*--adap"
    ):
        export_model(saved, Path(config.model), config, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_of_a_whole_model_has_no_adapters_to_export(
    tmp_path: Path, model_folder: Path
) -> None:
    policy, optimizer, _ = make_trainer(model_folder)
    write_checkpoint(tmp_path / "saved", policy, optimizer, 0)
    with pytest.raises(ExportError, match="export it without --adapters"):
        export_adapters(tmp_path / "saved", model_folder, tmp_path / "adapters")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_numbers_come_back_as_torch_reads_them(kind: str) -> None:
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[kind]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    found = decode_numbers(raw, kind)
    assert torch.from_numpy(found.copy()).equal(values.float())
    assert encode_numbers(found, kind) == raw
