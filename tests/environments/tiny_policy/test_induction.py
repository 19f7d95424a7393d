"""The start of attention: before any training, words that stood before are found again."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from flotilla_environments.tiny_policy.model import Shape, build_model

SHAPE = Shape(feed_forward=128, rope_theta=1e6, induces=True)
WORDS, LENGTH = 300, 60


def attention_of(model: Qwen3ForCausalLM, ids: list[int]) -> list[torch.Tensor]:
    """Return for each layer [heads, queries, keys]."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    return [layer[0] for layer in found]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return build_model(SHAPE, vocab_size=WORDS, eos_token_id=0, pad_token_id=1, seed=0)


@pytest.fixture(scope="module")
def twice() -> list[int]:
    """Words, each another one, and the same again."""
    words = (torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))[:LENGTH]).tolist()
    return [*words, *words]


def test_each_head_of_the_first_layer_looks_a_place_further_back(
    model: Qwen3ForCausalLM, twice: list[int]
) -> None:
    first = attention_of(model, twice)[0]
    for head in range(SHAPE.heads):
        assert torch.diagonal(first[head], -(head + 1)).min() > 0.8


def test_the_second_layer_finds_what_followed_a_word_before(
    model: Qwen3ForCausalLM, twice: list[int]
) -> None:
    plain = build_model(Shape(), vocab_size=WORDS, eos_token_id=0, pad_token_id=1, seed=0)
    for head in range(SHAPE.heads):
        # Row by row from the place LENGTH + SHAPE.heads on, LENGTH - 1 places back.
        found, chance = (
            torch.diagonal(
                attention_of(each, twice)[1][head, LENGTH + SHAPE.heads :], SHAPE.heads + 1
            ).mean()
            for each in (model, plain)
        )
        assert found > 3 * chance, head


def test_one_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="two layers"):
        build_model(
            Shape(layers=1, induces=True), vocab_size=8, eos_token_id=0, pad_token_id=1, seed=0
        )
