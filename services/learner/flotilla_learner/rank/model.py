"""The policy: any Hugging Face causal language model, and its logprobs on packs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_learner.algo.logprob_head import token_logprobs
from flotilla_learner.algo.packing import Segments, make_pack_layout
from flotilla_learner.algo.picture_positions import pack_positions
from flotilla_learner.rank.activation_offload import activation_offload
from flotilla_learner.rank.block_compilation import CompiledBlocks
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.device_transfer import to_device
from flotilla_learner.rank.lora import Adapters
from flotilla_learner.rank.parameter_names import base_parameters
from flotilla_learner.rank.pictures import Vision
from flotilla_learner.rank.routing_replay import (
    RoutedPass,
    RoutingReplay,
    pass_arguments,
)
from flotilla_learner.rank.segment_places import place_segments
from flotilla_learner.rank.sharding import (
    ShardLayout,
    add_forward,
    gather_tensor,
    reshard_unless_grad,
)
from flotilla_learner.types import TrainBatch

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IDLE_SEGMENTS = Segments([np.zeros(1, np.int32)])


@dataclass(frozen=True, slots=True)
class Policy:
    """A loaded model.

    Parameters are float32 whatever the compute dtype: an update of 1e-6 would vanish in
    bfloat16's 8 bits of mantissa. Matrix products run in `compute_dtype`. A model split over ranks
    uses it for all computation with parameters, because they arrive in it.
    """

    model: PreTrainedModel
    config: Any
    compute_dtype: torch.dtype
    device: torch.device
    # Several sequences in one forward pass give the same results as each alone.
    packable: bool
    # So does a prompt that is computed once for several sequences in a pack.
    shares_prompts: bool = False
    # Blocks' inputs are kept in host memory until the backward pass.
    offload_activations: bool = False
    # Longest sequence that the engines sample.
    max_model_len: int | None = None
    # Factor on the head's input that turns its output into logits.
    logit_scale: float = 1.0
    # Runs the body of a model that is split over ranks.
    run_body: Callable[[Segments, RoutedPass | None], Tensor] | None = None
    # Makes the routers of a mixture of experts follow the engine's, or compares them.
    routing: RoutingReplay | None = None
    # With adapters the parameters are frozen, and only the adapters are trained.
    adapters: Adapters | None = None
    # Compiles decoder blocks of this model, and of others made from it.
    compiled: CompiledBlocks | None = None
    # None: it reads text only.
    vision: Vision | None = None
    # Names of parameters that training leaves as they are.
    unchanged: frozenset[str] = frozenset()

    @property
    def head(self) -> Tensor:
        """Return the output head's weight [vocab, width]; the embedding's own if tied.

        The result is whole: for a split model this is collective."""
        output: Any = self.model.get_output_embeddings()
        return gather_tensor(output.weight)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the head has logits for."""
        output: Any = self.model.get_output_embeddings()
        return output.weight.shape[0]

    @property
    def width(self) -> int:
        """Length of a hidden state."""
        output: Any = self.model.get_output_embeddings()
        return output.weight.shape[1]

    @property
    def has_experts(self) -> bool:
        """True if the model routes each token to some of its experts."""
        return any(".experts." in name for name in self.named_parameters())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical Hugging Face name, each once: a tied head is left out.

        Adapters are not included; `published_tensor` applies them."""
        return base_parameters(self.model)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer updates, by name: all but frozen parts, or only the
        adapters'."""
        if self.adapters is not None:
            return self.adapters.named_parameters()
        named = self.named_parameters().items()
        return {name: parameter for name, parameter in named if name not in self.unchanged}

    def published_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that engines receive, by name: the model's, or only the adapters'."""
        if self.adapters is None or self.adapters.merged:
            # Frozen parts too: an engine replaces all of its weights or none.
            return self.named_parameters()
        return self.adapters.file_parameters()

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that a checkpoint holds, by their names in its file."""
        return self.named_parameters() if self.adapters is None else self.adapters.file_parameters()

    def published_tensor(self, name: str, parameter: Tensor) -> Tensor:
        """Return what engines receive for the parameter of this name: with its adapter merged, or
        for an adapter's matrix the form that they compute with."""
        if self.adapters is None:
            return parameter
        if self.adapters.merged:
            return self.adapters.merge(name, parameter)
        return self.adapters.scale(name, parameter, self.compute_dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass runs."""
        if self.compute_dtype == torch.float32 or self.is_split:
            return nullcontext()
        # A pass uses a weight once; a cache would hold all of them in the compute dtype, too.
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=False)

    def offload_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass of a body runs."""
        return activation_offload(self.device, enabled=self.offload_activations)

    def showing(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Return the context in which passes see the batch's pictures.

        Raises ValueError for pictures that are not those of the sequences."""
        if self.vision is not None:
            return self.vision.showing(batch)
        if any(sequence.pictures for sequence in batch.sequences):
            raise ValueError("a sequence shows pictures, but the run has no policy.vision")
        return nullcontext()

    @property
    def banned(self) -> Tensor | None:
        """Ids that engines never sample; their probability is 0 in training, too."""
        return None if self.vision is None else self.vision.banned

    def hidden_states(
        self,
        token_ids: Sequence[np.ndarray],
        pictures: Sequence[Sequence[PlacedPicture]] | None = None,
    ) -> Tensor:
        """Return the last hidden states [tokens, width] of sequences end to end.

        Their products with the head are the logits; they are in the compute dtype."""
        return self.segment_states(Segments(token_ids, pictures=pictures))

    def segment_states(self, segments: Segments, routed: RoutedPass | None = None) -> Tensor:
        """Return the hidden states of segments, some of which may continue others, with the experts
        of `routed`."""
        with self.autocast(), self.offload_context():
            states = self._body_states(segments, routed)
        if self.logit_scale != 1.0:
            states = states * self.logit_scale
        # Autocast keeps norms in float32; the head is a matrix product like the others.
        return states.to(self.compute_dtype)

    def make_pass(self, segments: Segments) -> RoutedPass | None:
        """Return the engine's experts for a pass over segments, if routers need them."""
        if self.routing is None or segments.experts is None:
            return None
        return self.routing.make_pass(segments.experts, segments.lengths, self.device)

    def _body_states(self, segments: Segments, routed: RoutedPass | None) -> Tensor:
        if self.run_body is None:
            body = self.model.base_model
            return body_states(body, segments, self.device, routed, self.vision)
        states = self.run_body(segments, routed)
        reshard_unless_grad(self.model)
        return states

    def split_over_ranks(self, layout: ShardLayout) -> "Policy":
        """Split the parameters over the ranks, unless they were loaded split."""

        def run(model: Any, segments: Segments, routed: RoutedPass | None = None) -> Tensor:
            return body_states(model.base_model, segments, self.device, routed, self.vision)

        if not isinstance(self.model, FSDPModule):
            layout.split_module(self.model)
        return replace(self, run_body=add_forward(self.model, "run_body", run))

    def pass_idly(self, segments: Segments = IDLE_SEGMENTS) -> None:
        """Take part in the other ranks' pass over a pack without own tokens; with gradients
        enabled, also backward, with gradients of 0."""
        hidden, head = self.segment_states(segments), self.head
        if torch.is_grad_enabled():
            (0.0 * hidden.sum() + 0.0 * head[:1].sum()).backward()

    @property
    def is_split(self) -> bool:
        """True if each rank holds a part of the parameters."""
        return self.run_body is not None


def body_states(
    body: Any,
    segments: Segments,
    device: torch.device,
    routed: RoutedPass | None = None,
    vision: Vision | None = None,
) -> Tensor:
    """Return the states [tokens, width] of a model without its head, for segments end to end.

    Without `vision` the segments show no pictures."""
    plan = make_pack_layout(segments.lengths, segments.parents)
    window = getattr(body.config.get_text_config(), "sliding_window", None)
    positions, seen = plan.position_ids[None], {}
    if vision is not None:
        positions = pack_positions(segments, vision.family.merge)[:, None]
        shown = [place for each in segments.pictures or () for place in each]
        seen = vision.encode(body, shown, device)
    output = body(
        input_ids=to_device(np.concatenate(segments.token_ids).astype(np.int64), device)[None],
        position_ids=to_device(positions, device),
        use_cache=False,
        segment_places=place_segments(plan, device, window),
        **pass_arguments(routed),
        **seen,
    )
    return output.last_hidden_state[0]


@torch.no_grad()
def score_tokens(
    policy: Policy,
    token_ids: np.ndarray,
    *,
    chunk: int,
    pictures: Sequence[PlacedPicture] = (),
) -> np.ndarray:
    """Return the logprobs [n - 1] of tokens 1..n-1 given their prefixes, at temperature 1, float32.

    They are those of given tokens: what is never sampled keeps its probability."""
    hidden = policy.hidden_states([token_ids], [pictures])[:-1]
    targets = torch.from_numpy(token_ids[1:].astype(np.int64)).to(policy.device)
    temperature = torch.ones(len(targets), device=policy.device)
    values = token_logprobs(hidden, policy.head, targets, temperature, chunk=chunk)
    return values.float().cpu().numpy()


@dataclass(frozen=True, slots=True)
class CanaryScores:
    """The canary's tokens, logprobs of all but the first, and the pictures shown among them."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    pictures: tuple[ShownPicture, ...]


def score_canary(policy: Policy, chunk: int) -> CanaryScores:
    """Score the canary; one picture is among its tokens if the policy sees any.

    Collective for a split policy."""
    ids = canary_token_ids(policy.vocabulary)
    if policy.vision is None:
        return CanaryScores(ids, score_tokens(policy, ids, chunk=chunk), ())
    ids, shown = policy.vision.make_canary(ids)
    with policy.vision.store.holding({shown.picture.sha256: shown.picture.data}):
        logprobs = score_tokens(policy, ids, chunk=chunk, pictures=[shown.place])
    return CanaryScores(ids, logprobs, (shown,))
