"""Warm start: next-token training on a demonstrator's episodes."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

from flotilla_common.images.picture import Picture

Model = Qwen3ForCausalLM | Qwen3VLForConditionalGeneration


@dataclass(frozen=True)
class Example:
    """One episode as tokens; `policy` marks the demonstrator's tokens, and `pictures` are shown in
    this order. A `basic` one is of the first lesson, if there are two."""

    ids: list[int]
    policy: list[bool]
    pictures: Sequence[Picture] = ()
    basic: bool = False


# What a model is given beside ids, [batch, tokens], by name: the pixels of a batch.
See = Callable[[Sequence[Example], Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of a training.

    The learning rate rises over `warmup_steps` and falls on a half cosine to `final_fraction`."""

    steps: int = 1_000
    batch_size: int = 8
    learning_rate: float = 1e-2
    warmup_steps: int = 20
    final_fraction: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of the update with this index (from 0)."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / self.steps))
        return (
            self.learning_rate * warmup * (self.final_fraction + (1 - self.final_fraction) * cosine)
        )


def warm_start(
    model: Model,
    examples: Sequence[Example],
    schedule: Schedule,
    *,
    pad_token_id: int,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    see: See = lambda batch, ids: {},
) -> None:
    """Train `model` in place; call `on_step(index, loss in nats a token)` after every update.

    Bit-equal when repeated with one thread.
    """
    optimizers = build_optimizers(model, schedule)
    batches = length_bucketed(examples, schedule.batch_size, random.Random(seed))
    model.train()
    for step in range(schedule.steps):
        batch = next(batches)
        ids, targets = collate_batch(batch, pad_token_id)
        loss = policy_loss(model, ids, targets, see(batch, ids))
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        on_step(step, loss.item())
    model.eval()


def build_optimizers(model: Model, schedule: Schedule) -> list[Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for embeddings and norms.

    AdamW alone fits as well at half the cost, but its policy learns less from RL afterwards. A
    tower gets AdamW: for its large matrices, Muon takes five times as long as the step itself.
    """
    sees = isinstance(model, Qwen3VLForConditionalGeneration)
    layers = model.model.language_model.layers if sees else model.model.layers
    inner = [p for p in layers.parameters() if p.ndim == 2]
    inner_ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in inner_ids]
    decay = schedule.weight_decay
    return [
        Muon(inner, momentum=0.95, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, betas=(0.9, 0.98), weight_decay=decay),
    ]


def length_bucketed(
    examples: Sequence[Example], batch_size: int, rng: random.Random
) -> Iterator[list[Example]]:
    """Yield full batches of examples of similar length, endlessly, in a new order each pass."""
    if len(examples) < batch_size:
        raise ValueError(f"{len(examples)} examples cannot fill a batch of {batch_size}")
    window = 12 * batch_size
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), window):
            similar = sorted(order[start : start + window], key=lambda e: len(e.ids))
            batches = [similar[i : i + batch_size] for i in range(0, len(similar), batch_size)]
            full = [batch for batch in batches if len(batch) == batch_size]
            yield from rng.sample(full, len(full))


def collate_batch(batch: Sequence[Example], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return right-padded inputs and shifted targets, [batch, longest - 1]; -100: no target."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), longest), pad_token_id)
    targets = torch.full((len(batch), longest), -100)
    for row, example in enumerate(batch):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens)] = torch.where(torch.tensor(example.policy), tokens, -100)
    return ids[:, :-1], targets[:, 1:]


def policy_loss(
    model: Model, ids: Tensor, targets: Tensor, seen: Mapping[str, Tensor] = MappingProxyType({})
) -> Tensor:
    """Return the mean cross entropy of the demonstrator's tokens; only those get logits.

    Causal attention hides the padding on the right, so no mask is needed.
    """
    hidden = model.model(input_ids=ids, use_cache=False, **seen).last_hidden_state
    chosen = targets != -100
    logits = model.lm_head(hidden[chosen])
    return torch.nn.functional.cross_entropy(logits.float(), targets[chosen])
