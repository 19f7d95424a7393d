"""Recorder of the experts that a model in vLLM chooses for each token. vLLM's workers import this
module.

vLLM's own `enable_return_routed_experts` needs its second model runner, which needs Triton: neither
exists on a CPU. Here experts are stored by the slots of the KV cache, like a token's keys and
values. So whatever finds a token's keys there, even by a cached prefix, also finds the experts that
they were computed with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.trajectory import expert_dtype

# Key of a request's `extra_args` that requests its experts, from that token on.
EXPERTS_FROM = "flotilla_experts_from"
# int16 holds the bits of uint16, which torch cannot index by.
_STORED = {1: torch.uint8, 2: torch.int16}


class ExpertRecorder:
    """Recorder of one worker; it lives as long as the model runner.

    Raises ValueError for a model without experts, or without a layer that attends to all tokens:
    layers that forget tokens reuse their slots."""

    def __init__(self, runner: Any, kept: int) -> None:
        """Keep the records of the last `kept` ended requests."""
        model, config = runner.model_config, runner.kv_cache_config
        experts, chosen = model.get_num_experts(), model.get_num_experts_per_tok()
        if experts < 2:
            raise ValueError("policy.routing_replay: this model has no experts; set it to off")
        self._runner = runner
        self._group, layer = _find_attention(config)
        self._layer_name = layer
        self._block = config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._rows = torch.zeros(
            config.num_blocks * self._block,
            model.get_total_num_hidden_layers(),
            chosen,
            dtype=_STORED[expert_dtype(experts)().itemsize],
        )
        self._preempted: dict[str, Tensor] = {}
        self._ended: BoundedDict[str, Tensor] = BoundedDict(kept)
        bind_routed_experts_capturer(runner.model, self)  # pyright: ignore[reportArgumentType]
        runner._update_states = self._watch_updates(runner._update_states)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Store a layer's choice in the current step; its router calls this."""
        slots: Any = get_forward_context().slot_mapping
        if self._layer_name not in slots:
            # A step without requests, as at the start.
            return
        slots = slots[self._layer_name][: len(topk_ids)]
        there = slots >= 0
        self._rows[slots[there], layer_id] = topk_ids[there].to(self._rows.dtype)

    def take_record(self, request_id: str) -> tuple[list[int], int, bytes] | None:
        """Return shape, bytes per id, and the expert ids of an ended request: [tokens, layers,
        experts per token], including slots after its last token. None if it is unknown."""
        rows = self._ended.pop(request_id, None)
        if rows is None:
            # Its end is not known here yet: it comes with the next step.
            running = (each for each in self._runner.requests if _own_id(each) == request_id)
            rows = self._read(next(running, ""))
        if rows is None:
            return None
        return list(rows.shape), rows.itemsize, rows.numpy().tobytes()

    def _watch_updates(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `update`, which begins a step, to notice the slots that it reassigns."""

        def update_states(step: Any) -> Any:
            for request in step.preempted_req_ids or ():
                rows = self._read(request)
                if rows is not None:
                    self._preempted[request] = rows
            for request in step.scheduled_cached_reqs.resumed_req_ids:
                self._preempted.pop(request, None)
            for request in step.finished_req_ids:
                self._keep_record(request)
            self._copy_blocks(step.kv_cache_block_copies or ())
            return update(step)

        return update_states

    def _keep_record(self, request: str) -> None:
        rows = self._preempted.pop(request, None)
        if rows is None:
            rows = self._read(request)
        if rows is not None:
            self._ended[_own_id(request)] = rows

    def _read(self, request: str) -> Tensor | None:
        """Return a copy of the rows of a request that wants them."""
        state = self._runner.requests.get(request)
        extra = (state.sampling_params.extra_args or {}) if state is not None else {}
        if state is None or EXPERTS_FROM not in extra:
            return None
        blocks = torch.tensor(state.block_ids[self._group], dtype=torch.int64)
        slots = blocks[:, None] * self._block + torch.arange(self._block)
        return self._rows[slots.flatten()[extra[EXPERTS_FROM] :]]

    def _copy_blocks(self, copies: Any) -> None:
        """Copy the blocks that the scheduler has copied in the KV cache."""
        rows = self._rows.view(-1, self._block, *self._rows.shape[1:])
        for source, target in copies:
            rows[target] = rows[source]


def _find_attention(config: Any) -> tuple[int, str]:
    """Return the index of the group of layers that attend to all tokens, and one of them."""
    for index, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return index, group.layer_names[0]
    raise ValueError(
        "policy.routing_replay: no layer of this model keeps all tokens; set it to off"
    )


def _own_id(request: str) -> str:
    """Return a request's id before vLLM made it unique."""
    return request.split("-", 1)[0]
