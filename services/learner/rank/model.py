"""The policy: any Hugging Face causal language model, and its logprobs on packs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from services.common.spec import PolicyConfig
from services.learner.algo.logprob_head import token_logprobs
from services.learner.algo.packing import Segments, make_pack_layout
from services.learner.config.lora import LoraConfig
from services.learner.config.rank import RankConfig
from services.learner.rank.activation_checkpointing import enable_checkpointing
from services.learner.rank.activation_offload import activation_offload
from services.learner.rank.device_transfer import to_device
from services.learner.rank.lora import ADAPTER, Adapters, add_adapters
from services.learner.rank.model_loading import ModelError, read_model, read_split_model
from services.learner.rank.parameter_names import base_parameters
from services.learner.rank.routing_replay import (
    RoutedPass,
    RoutingReplay,
    check_replay,
    pass_arguments,
    prepare_routers,
)
from services.learner.rank.sharding import (
    ShardLayout,
    add_forward,
    gather_tensor,
    reshard_unless_grad,
)

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CANARY_TOKENS = 32
IDLE_SEGMENTS = Segments([np.zeros(1, np.int32)])
# What float32 (bfloat16) arithmetic in another order may change about a logprob.
_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class Policy:
    """A loaded model.

    Parameters are float32 whatever the compute dtype: an update of 1e-6 would vanish in
    bfloat16's 8 bits of mantissa. Matrix products run in `compute_dtype`; of a model that is split
    over ranks all that is computed with a parameter does, for it arrives from them so.
    """

    model: PreTrainedModel
    config: Any
    compute_dtype: torch.dtype
    device: torch.device
    # Several sequences in one forward pass give what each gives alone.
    packable: bool
    # So does a prompt that is computed once for several sequences in a pack.
    shares_prompts: bool = False
    # Blocks' inputs wait in host memory for the backward pass.
    offload_activations: bool = False
    # The longest sequence that the engines sample.
    max_model_len: int | None = None
    # What the head gives is logits once its input has been multiplied by this.
    logit_scale: float = 1.0
    # Runs the body of a model that is split over ranks.
    run_body: Callable[[Segments, RoutedPass | None], Tensor] | None = None
    # Where the routers of a mixture of experts follow the engine's, or are held beside them.
    routing: RoutingReplay | None = None
    # With them the parameters are frozen, and these are trained.
    adapters: Adapters | None = None

    @property
    def head(self) -> Tensor:
        """The output head's weight [vocab, width]; the embedding's own when tied.

        Whole: of a split model all ranks ask for it, and at the same time."""
        output: Any = self.model.get_output_embeddings()
        return gather_tensor(output.weight)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the head gives logits for."""
        output: Any = self.model.get_output_embeddings()
        return output.weight.shape[0]

    @property
    def width(self) -> int:
        """The length of a hidden state."""
        output: Any = self.model.get_output_embeddings()
        return output.weight.shape[1]

    @property
    def has_experts(self) -> bool:
        """The model routes each token to some of its experts."""
        return any(".experts." in name for name in self.named_parameters())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical Hugging Face name, each once: a tied head is left out.

        Without adapters; `published_tensor` has them in."""
        return base_parameters(self.model)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer updates, by name: all, or the adapters'."""
        return (
            self.named_parameters() if self.adapters is None else self.adapters.named_parameters()
        )

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that a checkpoint holds, by their names in its file."""
        return self.named_parameters() if self.adapters is None else self.adapters.file_parameters()

    def published_tensor(self, name: str, parameter: Tensor) -> Tensor:
        """Return what engines are given for the parameter of this name: its adapter merged in."""
        return parameter if self.adapters is None else self.adapters.merge(name, parameter)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the forward pass runs."""
        if self.compute_dtype == torch.float32 or self.is_split:
            return nullcontext()
        # A pass uses a weight once; the cache would hold all of them in the compute dtype, too.
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=False)

    def offload_context(self) -> AbstractContextManager[Any]:
        """The context in which the forward pass of a body runs."""
        return activation_offload(self.device, enabled=self.offload_activations)

    def hidden_states(self, token_ids: Sequence[np.ndarray]) -> Tensor:
        """Return the last hidden states [tokens, width] of sequences end to end.

        Their products with the head are the logits; they are in the compute dtype."""
        return self.segment_states(Segments(token_ids))

    def segment_states(self, segments: Segments, routed: RoutedPass | None = None) -> Tensor:
        """Return the same of segments, some of which may continue others, with the experts that
        `routed` names."""
        with self.autocast(), self.offload_context():
            states = self._body_states(segments, routed)
        if self.logit_scale != 1.0:
            states = states * self.logit_scale
        # Autocast keeps norms in float32; the head is a matrix product like the others.
        return states.to(self.compute_dtype)

    def make_pass(self, segments: Segments) -> RoutedPass | None:
        """Return the engine's experts of a pass over segments, where routers ask for them."""
        if self.routing is None or segments.experts is None:
            return None
        return self.routing.make_pass(segments.experts, segments.lengths, self.device)

    def _body_states(self, segments: Segments, routed: RoutedPass | None) -> Tensor:
        if self.run_body is None:
            return body_states(self.model.base_model, segments, self.device, routed)
        states = self.run_body(segments, routed)
        reshard_unless_grad(self.model)
        return states

    def split_over_ranks(self, layout: ShardLayout) -> "Policy":
        """Split the parameters over the ranks, unless the model was read so."""

        def run(model: Any, segments: Segments, routed: RoutedPass | None = None) -> Tensor:
            return body_states(model.base_model, segments, self.device, routed)

        if not isinstance(self.model, FSDPModule):
            layout.split_module(self.model)
        return replace(self, run_body=add_forward(self.model, "run_body", run))

    def pass_idly(self) -> None:
        """Take part in the other ranks' pass over a pack, without tokens of one's own: backward,
        too, where gradients are wanted, all of them 0."""
        hidden, head = self.segment_states(IDLE_SEGMENTS), self.head
        if torch.is_grad_enabled():
            (0.0 * hidden.sum() + 0.0 * head[:1].sum()).backward()

    @property
    def is_split(self) -> bool:
        """True when each rank holds a part of the parameters."""
        return self.run_body is not None


def body_states(
    body: Any, segments: Segments, device: torch.device, routed: RoutedPass | None = None
) -> Tensor:
    """Return the states [tokens, width] of a model without its head, for segments end to end."""
    plan = make_pack_layout(segments.lengths, segments.parents)
    output = body(
        input_ids=to_device(np.concatenate(segments.token_ids).astype(np.int64), device)[None],
        position_ids=to_device(plan.position_ids, device)[None],
        use_cache=False,
        segment_offsets=plan.offsets,
        segment_parents=plan.parents,
        **pass_arguments(routed),
    )
    return output.last_hidden_state[0]


def canary_token_ids(vocab_size: int) -> np.ndarray:
    """Token ids [32] int32 that depend on the vocabulary's size alone, spread all over it."""
    golden = 0.6180339887498949
    spots = (np.arange(1, CANARY_TOKENS + 1, dtype=np.float64) * golden) % 1.0
    return (spots * vocab_size).astype(np.int32)


@torch.no_grad()
def score_tokens(policy: Policy, token_ids: np.ndarray, *, chunk: int) -> np.ndarray:
    """Return the logprobs [n - 1] of tokens 1..n-1 given those before them, at temperature 1.

    They are float32."""
    hidden = policy.hidden_states([token_ids])[:-1]
    targets = torch.from_numpy(token_ids[1:].astype(np.int64)).to(policy.device)
    temperature = torch.ones(len(targets), device=policy.device)
    values = token_logprobs(hidden, policy.head, targets, temperature, chunk=chunk)
    return values.float().cpu().numpy()


def load_policy(
    config: PolicyConfig,
    rank: RankConfig,
    source: str | Path | None = None,
    lora: LoraConfig | None = None,
) -> Policy:
    """Load the policy's weights, from `source` (a checkpoint folder) instead where given.

    With `lora` they are frozen and get adapters, which change nothing yet. Raises ModelError when
    the model cannot be found, or would not be trained as it is served."""
    dtype = DTYPES[config.dtype]
    model = read_model(config, source)
    adapters = add_adapters(model, lora, dtype) if lora is not None else None
    policy = prepare_policy(model, dtype, rank, adapters=adapters)
    return _follow_spec(policy, config)


def load_split_policy(
    config: PolicyConfig,
    rank: RankConfig,
    layout: ShardLayout,
    source: str | Path | None = None,
    lora: LoraConfig | None = None,
    adapter_names: Sequence[str] = (ADAPTER,),
) -> Policy:
    """Load this rank's part of the policy, as `load_policy` loads all of it.

    All adapters that it is to have are named now."""
    dtype, added = DTYPES[config.dtype], list[Adapters]()

    def prepare(model: PreTrainedModel) -> None:
        if lora is not None:
            added.append(add_adapters(model, lora, dtype, adapter_names))

    model = read_split_model(config, layout, source, prepare=prepare)
    adapters = added[-1] if added else None
    policy = prepare_policy(model, dtype, rank, layout=layout, adapters=adapters)
    return _follow_spec(policy, config)


def _follow_spec(policy: Policy, config: PolicyConfig) -> Policy:
    """Return the policy as the run's engines serve it."""
    policy = replace(policy, max_model_len=config.max_model_len)
    if config.routing_replay == "off":
        return policy
    segments = Segments([canary_token_ids(policy.vocabulary)])
    try:
        routing = prepare_routers(policy.model, replays=config.routing_replay == "replay")
        check_replay(routing, partial(policy.segment_states, segments), policy.device)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return replace(policy, routing=routing)


def prepare_policy(
    model: PreTrainedModel,
    dtype: torch.dtype,
    rank: RankConfig,
    *,
    layout: ShardLayout | None = None,
    adapters: Adapters | None = None,
) -> Policy:
    """Make a loaded model trainable and check that its logprobs are what it itself computes.

    With a `layout` each rank keeps a part."""
    device = torch.device(rank.device)
    if layout is None:
        nn.Module.to(model, device)
    _switch_dropout_off(model)
    _check_rope(model)
    if rank.gradient_checkpointing != "auto":
        enable_checkpointing(model, rank.gradient_checkpointing)
    model.train()
    scale = _logit_scale(model.config)
    policy = Policy(
        model,
        model.config,
        dtype,
        device,
        packable=False,
        logit_scale=scale,
        adapters=adapters,
    )
    policy = replace(policy, offload_activations=rank.offload_activations)
    if layout is not None:
        policy = policy.split_over_ranks(layout)
    if adapters is not None:
        adapters.reset()
    _check_head(policy)
    packable = _packs_are_exact(policy)
    shares = rank.share_prompts and packable and _shared_prompts_are_exact(policy)
    return replace(policy, packable=packable, shares_prompts=shares)


def _switch_dropout_off(model: nn.Module) -> None:
    """Switch dropout off: behaviour logprobs were computed without it.

    A ratio with dropout is noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _rope_types(model: nn.Module) -> set[str]:
    """Return transformers' names of how the model's layers turn positions into angles."""
    found: set[str] = set()
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, Mapping) else (kind,)
        found |= {name for name in kinds if isinstance(name, str)}
    return found


def _check_rope(model: nn.Module) -> None:
    """Refuse dynamic scaling.

    It keeps the angles of the longest sequence so far for those that follow."""
    if any("dynamic" in name for name in _rope_types(model)):
        raise ModelError(
            "this model's rope is scaled dynamically: what it gives a sequence depends on the "
            'sequences before it; set policy.rope_scaling, for example to rope_type = "yarn"'
        )


def _logit_scale(settings: Any) -> float:
    """Return the factor of a model's logits, as Cohere's configs and Granite's have it."""
    factor = getattr(settings, "logit_scale", None)
    divisor = getattr(settings, "logits_scaling", None)
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """Check that the fused head gives what the model's own forward pass gives.

    It would not for a head with a bias, or with capped logits."""
    ids = canary_token_ids(policy.vocabulary)
    with policy.autocast():
        output: Any = policy.model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(policy.device),
            use_cache=False,
        )
    if policy.is_split:
        reshard_unless_grad(policy.model)
    logits = output.logits[0, :-1].float()
    # Summed as the fused head does: torch's log_softmax rounds away unlikely tokens on CPUs.
    own = logits - logits.logsumexp(-1, keepdim=True)
    targets = torch.from_numpy(ids[1:].astype(np.int64)).to(policy.device)
    expected = own.gather(1, targets[:, None]).squeeze(1).cpu().numpy()
    worst = float(np.abs(score_tokens(policy, ids, chunk=CANARY_TOKENS) - expected).max())
    if not worst <= _TOLERANCE[policy.compute_dtype]:
        raise ModelError(
            f"{type(policy.model).__name__} computes its logits by more than a matrix product "
            f"with its output embeddings (logprobs differ by {worst:.3g}); choose another model"
        )


@torch.no_grad()
def _packs_are_exact(policy: Policy) -> bool:
    """Return True when a segment's hidden states do not depend on the segment before it.

    They do in models whose layers carry a state along the row (convolutions, linear attention),
    and with longrope, whose angles are chosen by the largest position in the row."""
    if "longrope" in _rope_types(policy.model):
        return False
    ids = canary_token_ids(policy.vocabulary)
    first, second = ids[:20], ids[20:]
    packed = policy.hidden_states([first, second])[len(first) :]
    alone = policy.hidden_states([second])
    return torch.allclose(packed.float(), alone.float(), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def _shared_prompts_are_exact(policy: Policy) -> bool:
    """Return True when two segments that continue the same prompt are what they are with it."""
    ids = canary_token_ids(policy.vocabulary)
    prompt, *ends = ids[:12], ids[12:20], ids[20:]
    shared = policy.segment_states(Segments([prompt, *ends], [None, 0, 0]))[len(prompt) :]
    alone = [policy.hidden_states([np.concatenate([prompt, end])]) for end in ends]
    whole = torch.cat([states[len(prompt) :] for states in alone])
    return torch.allclose(shared.float(), whole.float(), rtol=1e-2, atol=1e-2)
