"""Checks that a loaded policy computes the same as engines, and of what its packs may hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flotilla_learner.algo.packing import Segments
from flotilla_learner.rank.canary import CANARY_TOKENS, canary_token_ids
from flotilla_learner.rank.model import CanaryScores, Policy, score_canary
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.sharding import reshard_unless_grad

# Change of a logprob that reordered float32 (bfloat16) arithmetic may cause.
_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.25}
# The same for a state, relative to its length; another context changes it by more than half.
_STATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 0.1}


def _rope_types(model: nn.Module) -> set[str]:
    """Return transformers' names for how the model's layers turn positions into angles."""
    found: set[str] = set()
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, Mapping) else (kind,)
        found |= {name for name in kinds if isinstance(name, str)}
    return found


def check_rope(model: nn.Module) -> None:
    """Refuse dynamic scaling.

    It reuses the angles of the longest sequence so far for later ones."""
    if any("dynamic" in name for name in _rope_types(model)):
        raise ModelError(
            "this model's rope is scaled dynamically: its result for a sequence depends on the "
            'sequences before it; set policy.rope_scaling, for example to rope_type = "yarn"'
        )


def check_attention(settings: Any) -> None:
    """Refuse attention within chunks of tokens, like Llama 4's.

    Ranks would let every token see all earlier ones, which is right only for short sequences."""
    text = settings.get_text_config()
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise ModelError(
            f"layers of this model attend within chunks of {text.attention_chunk_size} tokens,"
            " which ranks do not compute; choose another model"
        )


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Check that our pass and the fused head give the same result as the model's own forward pass,
    which for a policy that sees pictures also places one.

    They would not for a head with a bias, or with capped logits."""
    canary = score_canary(policy, CANARY_TOKENS)
    ids = torch.from_numpy(canary.token_ids.astype(np.int64))[None].to(policy.device)
    with policy.autocast():
        output: Any = policy.model(
            input_ids=ids, use_cache=False, **_published_inputs(policy, canary, ids)
        )
    if policy.is_split:
        reshard_unless_grad(policy.model)
    logits = output.logits[0, :-1].float()
    # Summed as in the fused head: torch's log_softmax rounds away unlikely tokens on CPUs.
    own = logits - logits.logsumexp(-1, keepdim=True)
    expected = own.gather(1, ids[0, 1:, None]).squeeze(1).cpu().numpy()
    worst = float(np.abs(canary.logprobs - expected).max())
    if not worst <= _TOLERANCE[policy.compute_dtype]:
        raise ModelError(
            f"{type(policy.model).__name__} computes its logits by more than a matrix product "
            f"with its output embeddings (logprobs differ by {worst:.3g}); choose another model"
        )


def _published_inputs(policy: Policy, canary: CanaryScores, ids: Tensor) -> dict[str, Tensor]:
    """Return the arguments by which the published class sees the canary's pictures."""
    if policy.vision is None:
        return {}
    (shown,) = canary.pictures
    pixels = policy.vision.read_canary()
    return {
        "pixel_values": torch.from_numpy(pixels).to(policy.device),
        "image_grid_thw": torch.tensor([shown.place.grid], device=policy.device),
        "mm_token_type_ids": (ids == policy.vision.family.image_pad).int(),
    }


@torch.no_grad()
def packs_are_exact(policy: Policy) -> bool:
    """Return True if a segment's hidden states do not depend on the segment before it.

    They do in models whose layers carry a state along the row (convolutions, linear attention),
    and with longrope, whose angles depend on the largest position in the row."""
    if "longrope" in _rope_types(policy.model):
        return False
    ids = canary_token_ids(policy.vocabulary)
    first, second = ids[:20], ids[20:]
    packed = policy.hidden_states([first, second])[len(first) :]
    alone = policy.hidden_states([second])
    return _are_same(packed, alone)


@torch.no_grad()
def shared_prompts_are_exact(policy: Policy) -> bool:
    """Return True if segments that share a prompt give the same states as with their own copy."""
    ids = canary_token_ids(policy.vocabulary)
    prompt, *ends = ids[:12], ids[12:20], ids[20:]
    shared = policy.segment_states(Segments([prompt, *ends], [None, 0, 0]))[len(prompt) :]
    alone = [policy.hidden_states([np.concatenate([prompt, end])]) for end in ends]
    whole = torch.cat([states[len(prompt) :] for states in alone])
    return _are_same(shared, whole)


def _are_same(states: Tensor, expected: Tensor) -> bool:
    """Return True if states [tokens, width] differ by no more than the rounding of their dtype."""
    apart = (states.float() - expected.float()).norm(dim=-1)
    return bool((apart <= _STATE_TOLERANCE[states.dtype] * expected.float().norm(dim=-1)).all())
