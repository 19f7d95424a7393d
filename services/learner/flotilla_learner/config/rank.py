"""Settings of the ranks: `[learner.rank]`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import MOST_TOKENS, Seconds, Tokens


class BurnInConfig(ConfigModel):
    """Trial of the longest pack, forward and backward, before any sampling."""

    enabled: bool = True


class RankConfig(ConfigModel):
    """Use of machines by the training ranks."""

    device: Literal["cpu", "cuda"] = "cpu"
    # Ranks on each machine, each with a whole copy of the model (but see `shard`) and a share of
    # every batch; on `cuda` one per GPU. Never changes the loss.
    processes: int = Field(default=1, ge=1, le=1024)
    # Split parameters, gradients and moments over the ranks (FSDP2) instead of giving each a whole
    # copy. Never changes the loss beyond rounding.
    shard: bool = False
    # Split over the ranks of each machine and replicate across machines (HSDP): gathers stay within
    # a machine, and only gradients are summed between machines.
    shard_within_node: bool = False
    # Machines of the learner, joined by Ray (the extra `ray`). All but the first run `python -m
    # flotilla_learner.ranks`; `launcher.sky.learner.num_nodes` starts SkyPilot's that way. Only the
    # total number of ranks matters for the result, never how many share a machine.
    nodes: int = Field(default=1, ge=1, le=1024)
    # Network between these machines. gloo and NCCL neither encrypt nor authenticate, and anyone
    # who reads Ray's token on the wire can run programs on all of them, so several nodes are
    # refused on a `public` network, one with strangers in it.
    network: Literal["private", "public"] = "private"
    # How long the machines wait for each other.
    join_s: Seconds = 300.0
    # Continue with as few ranks if machines are missing after `join_s`; absent: all are required.
    min_ranks: int | None = Field(default=None, ge=1, le=1_048_576)
    # Port on the learner's machine at which Ray joins the others.
    ray_port: int = Field(default=6390, ge=1, le=65535)
    # CPU threads of torch in each rank. Only 1 makes a step on a CPU repeatable bit for bit, and
    # only on one kind of CPU.
    threads: int = Field(default=1, ge=1, le=1024)
    # Most tokens in one forward pass; never changes the loss. A longer sequence has its own pass.
    pack_tokens: Tokens = 4096
    # Compute a prompt that several sequences of a pack share only once. Never changes the loss
    # beyond rounding; does not apply to models whose packs would not be exact.
    share_prompts: bool = True
    # Policy tokens whose logits exist at the same time.
    head_chunk: Tokens = 512
    # Activations that the backward pass recomputes: none, all but the results of matrix products
    # and attention (about half the memory), or all but each block's input (about a third more
    # time). `auto` takes the first that fits into the GPU's memory, and `off` on a CPU.
    gradient_checkpointing: Literal["auto", "off", "selective", "full"] = "auto"
    # Have torch compile the decoder blocks of policy, reference and critic, except attention. It
    # takes minutes at a rank's first start; what cannot be compiled runs uncompiled. Changes losses
    # by rounding alone.
    compile: bool = False
    # Keep the block inputs that `full` leaves of activations in host memory until the backward
    # pass; on a CPU they are there anyway. Changes no result.
    offload_activations: bool = False
    # Keep AdamW's moments and master parameters in host memory: 8 bytes a parameter less on the
    # device; with `shard` also gradients, and no optimizer state stays on the device.
    offload_optimizer: bool = False
    # Keep the reference policy in host memory while unused; on a CPU it is there anyway.
    offload_reference: bool = True
    burn_in: BurnInConfig = BurnInConfig()
    # Tokens scored again after a step, for policy/post_update_kl; 0 switches it off.
    post_update_tokens: int = Field(default=4096, ge=0, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _parts_are_within_machines(self) -> Self:
        if self.shard and self.nodes > 1 and not self.shard_within_node:
            raise ValueError(
                "shard: parameters are split over the ranks of one machine; for several machines"
                " with a copy each, set learner.rank.shard_within_node = true, else set"
                " learner.rank.nodes = 1"
            )
        if self.shard_within_node and not self.shard:
            raise ValueError("shard_within_node: it has no effect without learner.rank.shard")
        return self

    @model_validator(mode="after")
    def _ranks_suffice(self) -> Self:
        most = self.nodes * self.processes
        if self.min_ranks is not None and self.min_ranks > most:
            raise ValueError(
                f"min_ranks: {self.min_ranks}, but learner.rank.nodes and processes make {most}"
                " ranks; set it to at most that"
            )
        return self

    @model_validator(mode="after")
    def _compiled_blocks_choose_themselves(self) -> Self:
        if self.compile and self.gradient_checkpointing == "selective":
            raise ValueError(
                'compile: "selective" cannot see the products within a compiled block, which keeps'
                " little more than those anyway; set learner.rank.gradient_checkpointing to"
                ' "off" or "full"'
            )
        return self

    @model_validator(mode="after")
    def _blocks_inputs_are_offloaded(self) -> Self:
        if self.offload_activations and self.gradient_checkpointing != "full":
            raise ValueError(
                "offload_activations: it offloads the inputs of blocks, which are all that is kept"
                ' with learner.rank.gradient_checkpointing = "full"; set that, too'
            )
        return self

    @model_validator(mode="after")
    def _strangers_reach_no_ranks(self) -> Self:
        if self.nodes > 1 and self.network == "public":
            raise ValueError(
                f"nodes: {self.nodes}, but network is 'public': ranks of several machines use gloo"
                " or NCCL, which neither encrypt nor authenticate; put the machines into"
                " one private network and set learner.rank.network = 'private', or set nodes = 1"
            )
        return self
