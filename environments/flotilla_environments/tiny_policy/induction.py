"""A start for attention that copies what followed a word before: induction heads, by hand.

A pair of layers learns them from data by itself (Olsson et al. 2022, arXiv 2209.11895), but late
and all of a sudden; where every value may be any word, only its place tells which one to copy, and
nothing else is learnt before. So the first layer begins with heads that each look a fixed number of
places back, and the second with heads that find where the present words stood before. All of it is
trained on."""

import math

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

# Of the residual stream, the one number that is the same for all tokens: heads of the first layer
# get their queries and keys from it alone, so that they look at places and not at words.
_CONSTANT = 0
_EMBEDDING_SCALE = 0.1
# Share of a word in the residual stream after a layer that adds those before it.
_EARLIER_SCALE = 0.15
# Frequencies of the rotation that tell places apart, and the first that hardly turns.
_FAST, _FIRST_SLOW = 3, 7
_SHARPNESS = (2.0, 1.6)


@torch.no_grad()
def start_induction(model: Qwen3ForCausalLM, heads: int, rope_theta: float) -> None:
    """Set the embeddings, and queries, keys, values and outputs of the first two layers, in place.

    Raises ValueError for a model of one layer."""
    layers = [each for each in model.modules() if isinstance(each, Qwen3Attention)]
    if len(layers) < 2:
        raise ValueError("induction takes two layers")
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0.0, _EMBEDDING_SCALE)
    embeddings[:, _CONSTANT] = 0.7 * _EMBEDDING_SCALE * math.sqrt(embeddings.shape[1])
    _find_again(layers[1], _look_back(layers[0], heads, rope_theta))
    for layer, sharpness in zip(layers, _SHARPNESS, strict=False):
        layer.q_norm.weight.fill_(sharpness)
        layer.k_norm.weight.fill_(sharpness)


def _look_back(attention: Qwen3Attention, heads: int, rope_theta: float) -> list[Tensor]:
    """Have head h of the first layer look h + 1 places back; return the map [hidden, hidden] by
    which it moves what it finds to directions of its own."""
    width, hidden = attention.q_proj.weight.shape
    size = width // heads
    half = size // 2
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query.zero_()
    key.zero_()
    moved: list[Tensor] = []
    for head in range(heads):
        first = head * size
        for turn in range(_FAST):
            # A query at place i is turned by i, and by head + 1 less: it meets keys there.
            angle = -(head + 1) * rope_theta ** (-2 * turn / size)
            query[first + turn, _CONSTANT] = math.cos(angle)
            query[first + half + turn, _CONSTANT] = math.sin(angle)
            key[first + turn, _CONSTANT] = 1.0
        value, output = (
            _orthogonal(hidden, size).T,
            _orthogonal(hidden, size),
        )
        value[:, _CONSTANT], output[_CONSTANT] = 0.0, 0.0
        attention.v_proj.weight[first : first + size] = value
        attention.o_proj.weight[:, first : first + size] = _EARLIER_SCALE * output
        moved.append(output @ value)
    return moved


def _find_again(attention: Qwen3Attention, moved: list[Tensor]) -> None:
    """Have head h of the second layer look for places before which, one place further back, stood
    what stands h places before the present one."""
    width, hidden = attention.q_proj.weight.shape
    size = width // len(moved)
    half = size // 2
    slow = [*range(_FIRST_SLOW, half)]
    rows = [*slow, *(half + turn for turn in slow)]
    attention.q_proj.weight.normal_(0.0, 0.02)
    attention.k_proj.weight.normal_(0.0, 0.02)
    for head in range(len(moved)):
        view = _orthogonal(hidden, len(rows)).T
        view[:, _CONSTANT] = 0.0
        places = [head * size + row for row in rows]
        attention.q_proj.weight[places] = view if head == 0 else view @ moved[head - 1].T
        attention.k_proj.weight[places] = view @ moved[head].T


def _orthogonal(rows: int, columns: int) -> Tensor:
    """Return a random matrix [rows, columns] with orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns))[0]
