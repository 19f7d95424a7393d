"""A plain sampler: batches of prompts of any length, a key-value cache, no engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM


@dataclass(frozen=True)
class Limits:
    """Limits of a turn: it ends at a stop id or `max_new_tokens`. Temperature 0 is greedy."""

    stop_ids: frozenset[int]
    max_new_tokens: int = 40
    temperature: float = 1.0


@dataclass(frozen=True)
class Sampled:
    """One turn: its token ids, the stop token included, and their natural logprobs."""

    ids: list[int]
    logprobs: list[float]


@torch.inference_mode()
def sample_turns(
    model: Qwen3ForCausalLM,
    prompts: Sequence[list[int]],
    limits: Limits,
    generator: torch.Generator | None = None,
) -> list[Sampled]:
    """Continue every prompt by one turn, in one left-padded batch."""
    ids, mask = left_padded(prompts)
    cache = DynamicCache()
    turns = [Sampled([], []) for _ in prompts]
    live = set(range(len(prompts)))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(limits.max_new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        ids, logprobs = choose_tokens(output.logits[:, -1].float(), limits.temperature, generator)
        for row in sorted(live):
            turns[row].ids.append(int(ids[row, 0]))
            turns[row].logprobs.append(float(logprobs[row]))
        live -= {row for row in live if turns[row].ids[-1] in limits.stop_ids}
        if not live:
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return turns


def left_padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, both [prompts, longest], padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def choose_tokens(
    logits: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return next ids [rows, 1] from logits [rows, vocabulary], and their logprobs [rows]."""
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature > 0:
        ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        ids = logprobs.argmax(-1, keepdim=True)
    return ids, logprobs.gather(1, ids)[:, 0]
