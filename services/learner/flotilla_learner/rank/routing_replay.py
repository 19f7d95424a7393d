"""Replay of the engine's experts by the trainer ("Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", arXiv 2510.11370).

Routers compute their own logits, and weight the engine's experts by them, so gradients remain.
A router is any module whose output transformers records as router logits. While it runs, its
call of `torch.topk` over all experts returns the engine's; so each family's own arithmetic
of scores, groups and weights stays as it is. `check_replay` tries it on the loaded model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flotilla_common.domain.trajectory import Experts
from flotilla_common.models.expert_models import count_experts
from flotilla_learner.types import ExpertShape

# Argument of a decoder block that carries the pass to its router.
_ARGUMENT = "routed_pass"
_UNKNOWN = -1
# Spreads token ids over 64 bits: 2^64 over the golden ratio.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_REFUSED = "policy.routing_replay: this model's routers do not follow the engine's"


@dataclass(slots=True)
class RoutedPass:
    """Experts for the tokens of one forward pass, and the routers' own choices."""

    # [tokens, layers, experts of a token]; -1 for tokens with unknown experts.
    engine: Tensor
    replays: bool
    # The routers' own choices by layer, [tokens, experts of a token].
    own: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts to use in a layer whose router chooses `own`."""
        # A block that is recomputed in the backward pass writes it twice.
        self.own[layer] = own
        engine = self.engine[:, layer]
        return torch.where(engine >= 0, engine, own) if self.replays else own

    def count_differences(self) -> "RoutingDifferences":
        """Count where engine and routers differ; the order of a token's experts is irrelevant."""
        known = self.engine[:, 0, 0] >= 0
        differs = [
            (own.sort(-1).values != self.engine[:, layer].sort(-1).values).any(-1) & known
            for layer, own in self.own.items()
        ]
        if not differs:
            return RoutingDifferences()
        by_layer = torch.stack(differs)
        tokens = int(known.sum())
        return RoutingDifferences(
            tokens, int(by_layer.any(0).sum()), tokens * len(differs), int(by_layer.sum())
        )


@dataclass(frozen=True, slots=True)
class RoutingDifferences:
    """Tokens that the engine routed, and those that the trainer's routers would send elsewhere;
    then the same per token and layer."""

    routed_tokens: int = 0
    rerouted_tokens: int = 0
    routed_choices: int = 0
    rerouted_choices: int = 0


@dataclass(frozen=True, slots=True)
class RoutingReplay:
    """Routers of a policy, ready for passes with the engine's experts."""

    shape: ExpertShape
    replays: bool

    def make_pass(
        self, experts: Sequence[Experts | None], lengths: Sequence[int], device: torch.device
    ) -> RoutedPass | None:
        """Return the pass over segments end to end; None if no segment has known experts.

        A segment may have known experts only for its first tokens."""
        if all(each is None for each in experts):
            return None
        size = (self.shape.layers, self.shape.chosen)
        joined = np.full((sum(lengths), *size), _UNKNOWN, np.int64)
        starts = np.cumsum([0, *lengths])
        for each, start, length in zip(experts, starts, lengths, strict=False):
            if each is not None:
                known = each[:length]
                joined[start : start + len(known)] = known
        return RoutedPass(torch.from_numpy(joined).to(device), self.replays)


def routed_token_keys(token_ids: NDArray[np.int32], experts: Experts | None) -> NDArray[np.uint64]:
    """Return a number for each token, equal for tokens that pass the same experts in the same
    order, and otherwise different except for one chance in 2^64."""
    keys = token_ids.astype(np.uint64) * _MIX
    if experts is not None:
        known = experts[: len(token_ids)].reshape(min(len(experts), len(token_ids)), -1)
        factors = np.random.default_rng(0).integers(2**64, size=known.shape[1], dtype=np.uint64)
        # Expert id 0 must differ from no expert.
        keys[: len(known)] ^= ((known.astype(np.uint64) + np.uint64(1)) * factors).sum(1)
    return keys


def pass_arguments(routed: RoutedPass | None) -> dict[str, RoutedPass]:
    """Return the arguments that make the routers of a model's body follow a pass."""
    return {_ARGUMENT: routed} if routed is not None else {}


def prepare_routers(model: Any, *, replays: bool) -> RoutingReplay:
    """Have each decoder block hand a pass to its router. Call it once per model.

    Raises ValueError for a model whose routers cannot be identified."""
    experts, chosen = count_experts(model.config.to_dict())
    blocks: Sequence[nn.Module] = getattr(model.get_decoder(), "layers", ())
    kind = _router_class(model.get_decoder())
    routers = {
        index: router
        for index, block in enumerate(blocks)
        for router in block.modules()
        if kind is not None and isinstance(router, kind)
    }
    if not (experts and chosen and routers):
        raise ValueError(
            f'policy.routing_replay: {type(model).__name__} has no known routers; set it to "off"'
        )
    for index, router in routers.items():
        state: Any = router
        state.routed_layer = _RoutedLayer(index, experts, chosen)
        state.forward = MethodType(_route, router)
    for block in blocks:
        block.register_forward_pre_hook(_hand_over_pass, with_kwargs=True)
    return RoutingReplay(ExpertShape(len(blocks), experts, chosen), replays)


@torch.no_grad()
def check_replay(
    routing: RoutingReplay, run: Callable[[RoutedPass | None], Tensor], device: torch.device
) -> None:
    """Check on a few tokens that the model's states are unchanged with the experts of its own
    choice, and differ with others. `run` returns states [tokens, width].

    Raises ValueError if not."""
    plain = run(None)
    size = (len(plain), routing.shape.layers, routing.shape.chosen)
    free = RoutedPass(torch.full(size, _UNKNOWN, device=device), replays=True)
    watched = run(free)
    own = torch.zeros(size, dtype=torch.int64, device=device)
    for layer, chosen in free.own.items():
        own[:, layer] = chosen
    same = run(RoutedPass(own, replays=True))
    others = run(RoutedPass((own + 1) % routing.shape.experts, replays=True))
    if not free.own or not torch.equal(plain, watched) or not torch.equal(plain, same):
        raise ValueError(f"{_REFUSED}: its own experts give other states than before")
    if torch.equal(plain, others):
        raise ValueError(f"{_REFUSED}: other experts give the same states")
    run(None)


@dataclass(slots=True)
class _RoutedLayer:
    """A router's view of its layer and of the current pass."""

    index: int
    experts: int
    chosen: int
    routed: RoutedPass | None = None


def _router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose output transformers records as router logits."""
    recorded: Any = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", recorded)
    # A plain linear layer only makes logits: another module chooses.
    return kind if isinstance(kind, type) and kind is not nn.Linear else None


def _hand_over_pass(
    block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    routed = named.pop(_ARGUMENT, None)
    for state in _routed_layers(block):
        state.routed = routed
    return arguments, named


def _routed_layers(block: nn.Module) -> Iterator[_RoutedLayer]:
    for module in block.modules():
        state = vars(module).get("routed_layer")
        if state is not None:
            yield state


@torch.compiler.disable
def _route(router: Any, *arguments: Any, **named: Any) -> Any:
    """Run a router's own `forward`, with the engine's experts if its pass has some."""
    state: _RoutedLayer = router.routed_layer
    own_forward = type(router).forward
    if state.routed is None:
        return own_forward(router, *arguments, **named)
    with _GivenExperts(state):
        return own_forward(router, *arguments, **named)


class _GivenExperts(TorchFunctionMode):
    """Result of `topk` over all experts: those of a pass, with their own scores."""

    def __init__(self, state: _RoutedLayer) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, state = args[0], self._state
        tokens = scores.numel() // scores.shape[-1]
        if (scores.shape[-1], found.indices.shape[-1]) != (state.experts, state.chosen):
            # A call over groups of experts, or over the best in each.
            return found
        assert state.routed is not None
        own = found.indices.detach().reshape(tokens, state.chosen)
        chosen = state.routed.choose(state.index, own).view_as(found.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
