"""A random Qwen3 of two layers, dense or sparse, and its tokenizer; and publications of it."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from flotilla_common.domain.policy import PolicyId
from flotilla_common.weights.fingerprint import TensorEntry, checksum64, compute_fingerprint
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_rollout.types import Publication

VOCAB = 384
HEADER_LENGTH_BYTES = 8
# Safetensors' word for it, and that of a manifest.
DTYPES = {"F32": "float32"}


def make_model(folder: Path) -> None:
    """Write a tied-head model and a tokenizer to `folder`; float32."""
    Qwen3ForCausalLM(Qwen3Config(**_sizes(folder))).save_pretrained(folder)


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """Return the model that `make_model` wrote, for evaluation."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_sparse_model(folder: Path, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Write a tied-head model of one dense layer and one of experts, and a tokenizer; float32."""
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        # Not a multiple of the block of a CPU's kernel, which pads it.
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**(_sizes(folder) | experts | sizes))
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_kind(folder: Path, kind: type[PreTrainedConfig], *, tied: bool) -> PreTrainedModel:
    """Return a model of this architecture."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes: dict[str, Any] = _sizes(folder) | {"tie_word_embeddings": tied}
    if kind is Qwen3MoeConfig:
        sizes |= experts
    config = kind(**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def _sizes(folder: Path) -> dict[str, Any]:
    """Return what the models have in common, once their tokenizer is in `folder`."""
    tokenizer = train_tokenizer(["find book hotel Rome system user assistant Tools"] * 3, 290)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "eos_token_id": int(str(tokenizer.convert_tokens_to_ids("<|im_end|>"))),
        "bos_token_id": None,
    }


def perturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Another model, near enough to be of the same kind and far enough to be distinguished."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


def publish(model: PreTrainedModel, path: Path, version: int, **fields: Any) -> Publication:
    """Write the weights as a learner does and describe them; `without` leaves one out."""
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    tensors = {
        name: value.detach().clone().contiguous()
        for name, value in model.state_dict().items()
        if name not in (tied, fields.get("without"))
    }
    save_file(tensors, path)
    data = np.fromfile(path, dtype=np.uint8)
    entries = _entries(data)
    total = len(data)
    return Publication(
        policy=PolicyId(1, version, compute_fingerprint(entries, total)),
        manifest=entries,
        total_bytes=total,
        transport=fields.get("transport", "shm"),
        location=fields.get("location", str(path)),
        canary_token_ids=fields.get("canary", np.arange(5, 40, dtype=np.int32)),
        timeout_s=fields.get("timeout_s", 120.0),
    )


def _entries(data: NDArray[np.uint8]) -> tuple[TensorEntry, ...]:
    import json

    length = int(data[:HEADER_LENGTH_BYTES].view("<u8")[0])
    start = HEADER_LENGTH_BYTES + length
    header = json.loads(data[HEADER_LENGTH_BYTES:start].tobytes())
    header.pop("__metadata__", None)
    return tuple(
        TensorEntry(
            name,
            DTYPES[row["dtype"]],
            tuple(row["shape"]),
            start + row["data_offsets"][0],
            checksum64(data[start + row["data_offsets"][0] : start + row["data_offsets"][1]]),
        )
        for name, row in header.items()
    )


def reference_logprobs(
    model: PreTrainedModel, token_ids: NDArray[np.int32], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Logprobs of tokens 1..n-1 given those before them, by transformers."""
    ids = torch.tensor(token_ids.tolist())[None]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
    return picked.numpy()
