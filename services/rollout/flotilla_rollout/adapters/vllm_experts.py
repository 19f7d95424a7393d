"""Experts of a finished request: from our recorder on a CPU, from vLLM's own on a GPU."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flotilla_common.domain.trajectory import Experts
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

# Records of requests whose caller is gone are never fetched.
_KEPT_PER_SLOT = 2
# Same name as in vllm_routing.py, which only workers import.
_EXPERTS_FROM = "flotilla_experts_from"


class EngineExperts:
    """Experts of one engine's requests."""

    def __init__(self, llm: "AsyncLLM", device: Literal["cpu", "cuda"]) -> None:
        self._llm = llm
        self._device = device

    async def start_recording(self, max_num_seqs: int) -> None:
        """Start recording in the workers. Raises vLLM's error for a model without experts."""
        if self._device == "cpu":
            kept = _KEPT_PER_SLOT * max_num_seqs
            await self._llm.collective_rpc("record_flotilla_experts", args=(kept,))

    def request_fields(self, sampling: Sampling) -> dict[str, Any]:
        """Return the fields of SamplingParams that request the experts."""
        if self._device == "cpu":
            return {"extra_args": {_EXPERTS_FROM: sampling.experts_from}}
        return {"routed_experts_prompt_start": sampling.experts_from}

    async def take_experts(self, answer: "RequestOutput", sampling: Sampling) -> Experts | None:
        """Return the experts of all tokens from `experts_from` on except the last, which the model
        has not read; None for a request that ended before its first token.

        Raises EngineError if there are fewer."""
        sampled = answer.outputs[0]
        if not sampled.token_ids:
            return None
        rows = await self._fetch_rows(answer)
        prompt = answer.prompt_token_ids or []
        wanted = len(prompt) + len(sampled.token_ids) - 1 - sampling.experts_from
        found = 0 if rows is None else len(rows)
        if rows is None or found < wanted:
            raise EngineError(f"vLLM named the experts of {found} tokens; {wanted} were computed")
        return rows[:wanted]

    async def _fetch_rows(self, answer: "RequestOutput") -> Experts | None:
        if self._device == "cuda":
            return answer.outputs[0].routed_experts
        answers = await self._llm.collective_rpc("take_flotilla_experts", args=(answer.request_id,))
        for found in answers:
            if found is not None:
                shape, size, data = found
                return np.frombuffer(data, np.uint8 if size == 1 else np.uint16).reshape(shape)
        return None
