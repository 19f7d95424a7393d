"""Choice of the activations that a GPU keeps, once the models are on it."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.activation_checkpointing import (
    choose_checkpointing,
    decoder_shape,
    enable_checkpointing,
)
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.sharding import local_tensor

# The process's output is the rank's log.
_log = logging.getLogger(__name__)


def fit_checkpointing(
    policy: Policy, rank: RankConfig, replicas: Replicas, bodies: Sequence[Any], reserved: int = 0
) -> None:
    """Have the bodies keep the activations that fit beside all else, equally on every rank.

    `reserved` are bytes for what comes later than now."""
    trained = (p for body in bodies for p in body.parameters() if p.requires_grad)
    parts = sum(local_tensor(p).numel() for p in trained)
    gradients_and_moments = 4 * parts if rank.offload_optimizer else 12 * parts
    hidden = decoder_shape(policy.config).hidden
    whole = (4 + 2 * policy.compute_dtype.itemsize) * policy.vocabulary * hidden
    head = 3 * 4 * rank.head_chunk * policy.vocabulary
    allocated = torch.cuda.memory_allocated(policy.device)
    tokens = max(rank.pack_tokens, policy.max_model_len or 0)
    vision = policy.vision
    pixels = 0 if vision is None else vision.pixel_bytes(tokens)
    taken = allocated + gradients_and_moments + whole + head + pixels + reserved
    size = torch.cuda.get_device_properties(policy.device).total_memory
    chosen = choose_checkpointing(
        *(policy.config, tokens, policy.compute_dtype, replicas.largest_number(taken), size),
        compiled=rank.compile,
        tower=vision is not None and vision.config.tower == "trained",
    )
    _log.info("gradient_checkpointing: %s fits into the GPU's memory", chosen)
    for body in bodies:
        enable_checkpointing(body, chosen)
