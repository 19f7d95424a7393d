"""Estimate of the activations that a decoder keeps for its backward pass. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["off", "selective", "full"]
# Elements that one decoder layer keeps per token: with `full` only its input, with `selective`
# also the results of matrix products and attention.
_LAYER_ELEMENTS: Mapping[Checkpointing, Callable[["DecoderShape"], int]] = {
    "off": lambda shape: 16 * shape.hidden + 3 * shape.intermediate,
    "selective": lambda shape: 7 * shape.hidden + 2 * shape.intermediate,
    "full": lambda shape: shape.hidden,
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder that its activations depend on."""

    layers: int
    hidden: int
    intermediate: int


def layer_activation_bytes(
    shape: DecoderShape, tokens: int, item_bytes: int, checkpointing: Checkpointing
) -> int:
    """Return the bytes that all layers keep for a pack of `tokens`, plus those of the one layer
    whose activations are recomputed in the backward pass."""
    kept = shape.layers * _LAYER_ELEMENTS[checkpointing](shape)
    again = 0 if checkpointing == "off" else _LAYER_ELEMENTS["off"](shape)
    return tokens * item_bytes * (kept + again)
