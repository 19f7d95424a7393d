"""A random Qwen3 of one layer with its tokenizer, and its arithmetic in NumPy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from flotilla_environments.tiny_policy.tokenizer import TURN_END, save_tokenizer, train_tokenizer

# vLLM has no kernel for narrower heads.
HIDDEN, HEADS, HEAD_WIDTH, FEED_FORWARD, VOCABULARY = 64, 2, 32, 96, 1024
ROPE_THETA, EPSILON = 10_000.0, 1e-6
Array = NDArray[np.floating[Any]]


def write_policy(folder: Path, corpus: Sequence[str], seed: int = 0) -> None:
    """A model folder with every weight drawn from `seed`."""
    tokenizer = train_tokenizer(corpus, VOCABULARY - 16)
    save_tokenizer(tokenizer, folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_WIDTH,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    redraw(folder, seed)


def redraw(folder: Path, seed: int) -> None:
    """Give the model of a folder the weights of `seed`."""
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    width = HEADS * HEAD_WIDTH
    shapes: Mapping[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (width, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (width, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (width, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, width),
        "model.layers.0.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
    }
    drawn = {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in shapes.items()}
    norms = {
        "model.layers.0.input_layernorm.weight": HIDDEN,
        "model.layers.0.post_attention_layernorm.weight": HIDDEN,
        "model.layers.0.self_attn.q_norm.weight": HEAD_WIDTH,
        "model.layers.0.self_attn.k_norm.weight": HEAD_WIDTH,
        "model.norm.weight": HIDDEN,
    }
    return drawn | {name: np.ones(size, np.float32) for name, size in norms.items()}


def token_logprobs(weights: Mapping[str, Array], ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logprobs [n - 1] of tokens 1..n-1, each given those before it."""
    embedding = weights["model.embed_tokens.weight"]
    layer = {
        name.removeprefix("model.layers.0."): value
        for name, value in weights.items()
        if name.startswith("model.layers.0.")
    }
    x = embedding[ids[:-1]]
    x = x + _attention(layer, _normed(x, layer["input_layernorm.weight"]))
    y = _normed(x, layer["post_attention_layernorm.weight"])
    gate = y @ layer["mlp.gate_proj.weight"].T
    up = y @ layer["mlp.up_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    logits = _normed(x, weights["model.norm.weight"]) @ embedding.T
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)


def _normed(x: Array, weight: Array) -> Array:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)


def _attention(layer: Mapping[str, Array], x: Array) -> Array:
    length = len(x)

    def heads(name: str) -> Array:
        projected = x @ layer[f"self_attn.{name}.weight"].T
        return projected.reshape(length, HEADS, HEAD_WIDTH).transpose(1, 0, 2)

    q = _rotated(_normed(heads("q_proj"), layer["self_attn.q_norm.weight"]))
    k = _rotated(_normed(heads("k_proj"), layer["self_attn.k_norm.weight"]))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(HEAD_WIDTH)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: Any = (shares / shares.sum(-1, keepdims=True)) @ heads("v_proj")
    flat = mixed.transpose(1, 0, 2).reshape(length, HEADS * HEAD_WIDTH)
    return flat @ layer["self_attn.o_proj.weight"].T


def _rotated(x: Array) -> Array:
    """Rotary position embedding in the half-split form of Hugging Face models."""
    half = HEAD_WIDTH // 2
    frequencies = ROPE_THETA ** (-np.arange(half) / half)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
