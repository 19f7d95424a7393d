"""Requests that are answered with the policy's adapter, and its loading into all workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# One for all versions: a request under way names it, and goes on with what lies under it.
ADAPTER_ID = 1
# What vLLM has kernels and buffers for.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def padded_rank(rank: int) -> int:
    """Return the least rank that vLLM has room for and that holds `rank`."""
    return next(each for each in _RANKS if each >= rank)


def make_adapter_request() -> "LoRARequest":
    """Return what vLLM is told with each request; the path is of no file, and never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "published")


async def load_adapter(
    llm: "AsyncLLM",
    path: str,
    total_bytes: int,
    rows: Sequence[tuple[str, str, Sequence[int], int]],
) -> None:
    """Replace the adapter in all workers. Raises ValueError where none has one of its layers."""
    said = await llm.collective_rpc("load_flotilla_adapter", args=(path, total_bytes, rows))
    applied = sum(len(layers) for layers in {tuple(each) for each in said})
    wanted = sum(name.endswith(".lora_A.weight") for name, *_ in rows)
    if applied != wanted:
        raise ValueError(
            f"of {wanted} layers with an adapter the engine has {applied}: leave the others out of"
            " learner.lora.target_modules, or policy.adapter_rank"
        )
