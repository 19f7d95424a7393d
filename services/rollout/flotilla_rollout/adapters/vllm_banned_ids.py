"""Token ids that are never sampled. vLLM's workers import this module."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as SecondLogitsProcessor,
)


class BannedIds(LogitsProcessor, SecondLogitsProcessor):
    """Logits processor, of both of vLLM's model runners, that bans the same ids in all requests.

    Logprobs of the sampled distribution leave them out; those of prompts, by which updates are
    judged, do not."""

    def __init__(self, vllm_config: Any, *given: Any) -> None:
        del given
        self._ids = torch.tensor(vllm_config.additional_config["flotilla_banned_ids"])

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all; see the base classes."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep nothing of requests; see the base class."""

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        del ctx
        self._ids = self._ids.to(logits.device)
        return logits.index_fill_(-1, self._ids, float("-inf"))
