"""The model that recipes train: a Qwen3 of 0.2 million parameters, and its tokenizer."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flotilla_environments.tiny_policy.tokenizer import (
    TURN_END,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

# Ids, and the weight of each as a target.
Example = tuple[list[int], list[float]]
Lessons = Callable[[PreTrainedTokenizerFast], Iterator[Example]]
WINDOW = 2048
_VOCABULARY = 640
_STEPS = 120
_BATCH = 8


def train_base(folder: Path, lessons: Lessons) -> None:
    """Write the model, trained on the lessons, and its tokenizer, whose words are theirs."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tokenizer = _learn_words(lessons)
    save_tokenizer(tokenizer, folder)
    model = Qwen3ForCausalLM(_config(tokenizer))
    examples = lessons(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        _loss(model, list(islice(examples, _BATCH))).backward()
        optimizer.step()
    model.save_pretrained(folder)


def _learn_words(lessons: Lessons) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which each word of a few lessons is one token."""
    bytes_only = train_tokenizer([], 256)
    texts = [str(bytes_only.decode(ids)) for ids, _ in islice(lessons(bytes_only), 64)]
    return train_tokenizer(texts, _VOCABULARY)


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": True,
        # Words that no lesson has must be told apart: adapters do not train embeddings.
        "initializer_range": 0.1,
        "eos_token_id": token_id(tokenizer, TURN_END),
        "bos_token_id": None,
    }
    return Qwen3Config(**sizes)


def _loss(model: Qwen3ForCausalLM, examples: list[Example]) -> torch.Tensor:
    length = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in examples])
    weights = torch.tensor([given + [0.0] * (length - len(given)) for _, given in examples])
    logprobs = model(ids).logits[:, :-1].log_softmax(-1)
    picked = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    return -(picked * weights[:, 1:]).sum() / weights[:, 1:].sum()
