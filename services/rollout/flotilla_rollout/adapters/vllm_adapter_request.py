"""Requests answered with the policy's adapter, and its loading into all workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# One id for all versions: running requests name it, and continue with the newest version.
ADAPTER_ID = 1
# Ranks for which vLLM has kernels and buffers.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def padded_rank(rank: int) -> int:
    """Return the smallest rank supported by vLLM that holds `rank`."""
    return next(each for each in _RANKS if each >= rank)


def make_adapter_request() -> "LoRARequest":
    """Return the adapter field of each request; its path names no file and is never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "published")


async def load_adapter(
    llm: "AsyncLLM",
    path: str,
    total_bytes: int,
    rows: Sequence[tuple[str, str, Sequence[int], int]],
) -> None:
    """Replace the adapter in all workers. Raises ValueError if no worker has one of its layers."""
    layer_lists = await llm.collective_rpc("load_flotilla_adapter", args=(path, total_bytes, rows))
    applied = sum(len(layers) for layers in {tuple(each) for each in layer_lists})
    wanted = sum(name.endswith(".lora_A.weight") for name, *_ in rows)
    if applied != wanted:
        raise ValueError(
            f"of {wanted} layers with an adapter the engine has {applied}: leave the others out of"
            " learner.lora.target_modules, or policy.adapter_rank"
        )
