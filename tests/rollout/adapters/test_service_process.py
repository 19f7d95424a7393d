"""The process of a rollout at a Tinker service holds neither the model's weights nor torch."""

import subprocess
import sys
from pathlib import Path

from transformers import Qwen3Config

from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from tests.support.model_hub import FIRST, ModelHub, model_hub
from tests.support.repository import ROOT

CODE = """
import sys
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_rollout.__main__ import check_here, prepare_service_use
from flotilla_rollout.config.rollout import EngineConfig, RolloutConfig

engine = EngineConfig(kind="tinker")
config = RolloutConfig(max_input_length=8, max_generate_length=8, engine=engine)
shared = SharedConfig(name="x", policy=PolicyConfig(model="org/model", max_model_len=64))
print(check_here(shared, config))
use = prepare_service_use(shared, config)
from flotilla_rollout.adapters.model_files import read_model_files
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
model = read_model_files(shared, config)
print(sorted(path.name for path in model.folder.iterdir()))
print(sys.modules["torch"], "vllm" in sys.modules)
"""


def test_a_rollout_at_a_service_needs_neither_weights_nor_torch(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["find book hotel"] * 3, 290), tmp_path / "model")
    Qwen3Config(vocab_size=384).save_pretrained(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    weights = {"model.safetensors": b"w" * 100, "model.safetensors.index.json": b"{}"}
    with model_hub(ModelHub({FIRST: files | weights})) as hub:
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env={"PATH": "", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100.0,
        )
    assert done.returncode == 0, done.stderr
    unchecked, *_, found, modules = done.stdout.splitlines()
    assert unchecked == "the dialect of org/model is rehearsed once it has been downloaded"
    assert found == str(sorted([*files, "model.safetensors.index.json"]))
    assert modules == "None False"
