"""Tokens of one batch get the product of their own adapter on a CPU, or none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

WIDTH, PLACES, RANK = 6, 3, 2
SLICES = (4, 2)


def make_stack(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn((PLACES, 1, rows, columns), generator=generator)


@pytest.mark.parametrize("chosen", [[0, 5, 5, 7, 0, 7], [0, 0, 0, 0, 0, 0], [7, 7, 7, 7, 7, 7]])
def test_each_token_gets_its_own_adapter_or_none(chosen: list[int]) -> None:
    """Adapter 5 is in place 2, the last one, which vLLM itself gives to tokens without any."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from flotilla_rollout.sampling.adapters.vllm_cpu_adapters import correct_adapters

    generator = torch.Generator().manual_seed(0)
    wrapper: Any = PunicaWrapperCPU(16, 16, "cpu")
    correct_adapters(SimpleNamespace(punica_wrapper_mapping={"language": wrapper}))
    ids = [7, None, 5]
    mapping = LoRAMapping(tuple(chosen), tuple(chosen), is_prefill=True)
    wrapper.update_metadata(mapping, ids, PLACES + 1, 100)
    a = tuple(make_stack(generator, RANK, WIDTH) for _ in SLICES)
    b = tuple(make_stack(generator, rows, RANK) for rows in SLICES)
    inputs = torch.randn((len(chosen), WIDTH), generator=generator)
    # A layer's output may be wider than what has adapters.
    before = torch.randn((len(chosen), sum(SLICES) + 1), generator=generator)
    outputs = before.clone()
    wrapper.add_lora_linear(outputs, inputs, a, b, 1.0, SLICES)
    expected = before.clone()
    for token, adapter in enumerate(chosen):
        if adapter:
            place = ids.index(adapter)
            deltas = [y[place, 0] @ x[place, 0] @ inputs[token] for x, y in zip(a, b, strict=True)]
            expected[token, :-1] += torch.cat(deltas)
    torch.testing.assert_close(outputs, expected)
