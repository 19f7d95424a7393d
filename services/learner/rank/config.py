"""The rank's part of `[learner]`: `[learner.rank]`, and what a rank is told at its start."""

from typing import Literal

from pydantic import Field

from services.common.config import Model


class RankConfig(Model):
    """How the training rank uses its machine."""

    device: Literal["cpu", "cuda"] = "cpu"
    # CPU threads of torch. On a CPU only 1 makes a step repeatable bit for bit.
    threads: int = Field(default=1, ge=1)
    # Most tokens in one forward pass; never changes the loss. A longer sequence goes alone.
    pack_tokens: int = Field(default=4096, ge=1)
    # Policy tokens whose logits exist at once.
    head_chunk: int = Field(default=512, ge=1)
    # Recompute activations in the backward pass: about a third more time, much less memory.
    gradient_checkpointing: bool = False
    # Keep AdamW's moments and master parameters in host memory: 8 bytes a parameter less on the
    # device.
    offload_optimizer: bool = False
