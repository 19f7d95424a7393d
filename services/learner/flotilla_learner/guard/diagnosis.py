"""Diagnosis: the setting that explains a disagreement of engine and trainer. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.types import Comparison, Hypothesis, PositionBand, Setting, VersionMismatch

# An explanation leaves at most this share of the error.
_LEFT = 0.1
# Two computations in one coarse dtype differ about as much as each from a fine one.
_ALIKE = 3.0
# Finest first. A finer engine cannot be further off than the trainer's own rounding.
_COARSENESS = ("float32", "float16", "bfloat16")
_FIXES: dict[Setting, str] = {
    "temperature": (
        "have the engine report logprobs of the distribution that it samples from, at"
        ' learner.temperature (vLLM: logprobs_mode = "processed_logprobs", no other penalties)'
    ),
    "dtype": "serve the policy in policy.dtype, or set policy.dtype to the engine's dtype",
    "rope": (
        "give the engine the model's config.json with policy.rope_scaling applied, as the"
        " trainer has it"
    ),
    "head": "have the engine load the output head, tied or not, from every update",
    "weights": "have the engine load the published weights, and serve nothing before",
}
_NO_FIX = "compare the engine's options and its model's config.json with the trainer's"
_EXPERTS = (
    "; in a model with experts it is often the MoE expert layout: the engine's kernel reads weights"
    " that an update left in the checkpoint's layout"
)
_EXPERTS_FIX = f"try another rollout.engine.options.moe_backend, or {_NO_FIX}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Explanation of a mismatch; `setting` is None if no single one explains the error."""

    setting: Setting | None
    sentence: str
    fix: str


def diagnose_mismatch(
    found: VersionMismatch, comparison: Comparison, policy: PolicyConfig, temperature: float
) -> Diagnosis:
    """Diagnose a mismatch; `found` is the one that `comparison.hypotheses` were tested on."""
    best = _find_exact(found, comparison.hypotheses) or _find_rounding(
        found, comparison, policy.dtype
    )
    grows = _describe_growth(comparison.bands)
    if best is None:
        closest = min(comparison.hypotheses, key=lambda h: h.residual, default=None)
        sentence = f"no single setting explains it{grows}{_describe_closest(closest)}"
        if comparison.experts:
            return Diagnosis(None, sentence + _EXPERTS, _EXPERTS_FIX)
        return Diagnosis(None, sentence, _NO_FIX)
    sentence = (
        f"{_describe_cause(best, policy, temperature)} (error then {best.residual:.2g}){grows}"
    )
    return Diagnosis(best.setting, sentence, _FIXES[best.setting])


def _find_exact(found: VersionMismatch, hypotheses: Sequence[Hypothesis]) -> Hypothesis | None:
    """Return the hypothesis that leaves the least of the error, if that is little."""
    tried = [h for h in hypotheses if h.setting != "dtype"]
    best = min(tried, key=lambda h: h.residual, default=None)
    return best if best and best.residual <= _LEFT * found.abs_diff else None


def _find_rounding(found: VersionMismatch, comparison: Comparison, dtype: str) -> Hypothesis | None:
    """Return the coarser dtype whose rounding is about as large as the error.

    Another implementation cannot reproduce rounding, so its residual means nothing."""

    def log_distance(hypothesis: Hypothesis) -> float:
        if not (hypothesis.effect > 0 and 0 < found.abs_diff < math.inf):
            return math.inf
        excess = math.log(found.abs_diff / hypothesis.effect)
        # Kernels that add up in float32 round less than the trainer's trial, which rounds
        # everything; by how much depends on the processor. None rounds much more.
        return excess if excess > 0 else -excess / 2

    own = _COARSENESS.index(dtype)
    coarser = [
        h
        for h in comparison.hypotheses
        if h.setting == "dtype" and _COARSENESS.index(h.value) > own
    ]
    best = min(coarser, key=log_distance, default=None)
    return best if best and log_distance(best) <= math.log(_ALIKE) else None


def _describe_cause(best: Hypothesis, policy: PolicyConfig, temperature: float) -> str:
    match best.setting:
        case "temperature":
            return (
                f"temperature differs: the engine's logprobs are those of {best.value},"
                f" learner.temperature is {temperature:g}"
            )
        case "dtype":
            return (
                f"dtype differs: the error is as large as computing in {best.value} makes it,"
                f" policy.dtype is {policy.dtype}"
            )
        case "rope":
            return f"rope differs: the engine encodes positions {_describe_rope(best.value)}"
        case "head":
            return f"the output head differs: the engine's is {best.value}"
        case "weights":
            return f"the weights differ: the engine's are {best.value}"


def _describe_rope(value: str) -> str:
    return value if value.startswith("without") else f"with {value}"


def _describe_growth(bands: Sequence[PositionBand]) -> str:
    if len(bands) < 2:
        return ""
    near, far = bands[0], bands[-1]
    return (
        f"; off by {near.abs_diff:.2g} on average before position {far.start},"
        f" by {far.abs_diff:.2g} from there on"
    )


def _describe_closest(hypothesis: Hypothesis | None) -> str:
    if hypothesis is None:
        return ""
    what = f"{hypothesis.setting} {hypothesis.value}"
    return f"; closest is {what}, which leaves {hypothesis.residual:.2g}"
