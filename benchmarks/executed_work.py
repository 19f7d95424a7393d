"""Floating-point operations that a training step executes, without those that it repeats.

A product of a parameter and a token costs 6: 2 forward, 4 backward. Counted are

- the decoder's parameters on every token, but no embedding, which is looked up;
- the output head on the tokens whose loss is computed, and on no other;
- attention within each sequence, of each token to those before it: a layer's scores and their
  weighted values take 2 products a head's width and pair, of which causality leaves half.

Activations that are computed again for the backward pass and passes that only score are not
counted: they are ways to do the same work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Sizes of a model that determine its work."""

    # Parameters of the decoder's layers and norms, and of the output head.
    decoder: int
    head: int
    layers: int
    # Of all heads of a layer.
    attention_width: int

    def step_flops(self, lengths: Sequence[int], head_tokens: int) -> float:
        """Return the operations of a step over sequences of these lengths."""
        pairs = sum(length * length / 2 for length in lengths)
        attention = 12 * self.layers * self.attention_width * pairs
        return 6 * self.decoder * sum(lengths) + 6 * self.head * head_tokens + attention


def model_work(config: Any, parameters: int) -> ModelWork:
    """Return the work of a dense model with this configuration and number of parameters, of which a
    tied head is counted once."""
    head = config.vocab_size * config.hidden_size
    matrices = 1 if config.tie_word_embeddings else 2
    width = config.num_attention_heads * config.head_dim
    return ModelWork(parameters - matrices * head, head, config.num_hidden_layers, width)
