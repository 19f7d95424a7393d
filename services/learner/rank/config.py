"""The ranks' part of `[learner]`: `[learner.rank]`."""

from typing import Literal

from pydantic import Field

from services.common.config import Model


class RankConfig(Model):
    """How the training ranks use their machine."""

    device: Literal["cpu", "cuda"] = "cpu"
    # Ranks on this machine, each with a whole copy of the model and a share of every batch; on
    # `cuda` one to each GPU. Never changes the loss.
    processes: int = Field(default=1, ge=1)
    # CPU threads of torch in each. On a CPU only 1 makes a step repeatable bit for bit.
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
    # Keep the reference policy in host memory while it is not used; on a CPU it is there anyway.
    offload_reference: bool = True
    # Tokens that are scored again after a step, for policy/post_update_kl; 0 switches it off.
    post_update_tokens: int = Field(default=4096, ge=0)
