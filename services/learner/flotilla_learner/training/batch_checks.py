"""Losses, what each takes, and checks of what callers send for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training_types import AdamUpdate, TargetSequence

_SAMPLED = ("logprobs", "advantages")
_CLIPS = (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))


@dataclass(frozen=True, slots=True)
class LossRule:
    """Inputs of a loss by name, and its options with their defaults."""

    required: tuple[str, ...] = _SAMPLED
    optional: tuple[str, ...] = ("mask",)
    options: tuple[tuple[str, float], ...] = ()
    # Takes several targets at each position.
    several: bool = False


LOSSES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(("weights",), (), several=True),
    "importance_sampling": LossRule(),
    "ppo": LossRule(options=_CLIPS),
    "cispo": LossRule(options=_CLIPS),
    "dro": LossRule(options=(("beta", 0.05),)),
    "gspo": LossRule((*_SAMPLED, "sequence_ratio_mask"), options=_CLIPS),
}


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits of the base."""

    max_model_len: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class RawSequence:
    """A sequence as it arrives: little-endian arrays."""

    token_ids: bytes
    target_ids: bytes
    # 0 means 1.
    targets: int
    inputs: Mapping[str, bytes]


def find_rule(loss: str) -> LossRule:
    """Raise OperationRefused UNKNOWN_LOSS if there is none."""
    if loss not in LOSSES:
        raise OperationRefused("UNKNOWN_LOSS", f"no loss {loss!r}; there are {', '.join(LOSSES)}")
    return LOSSES[loss]


def complete_options(loss: str, given: Mapping[str, float]) -> dict[str, float]:
    """Return a loss's options with its defaults. Raises OperationRefused."""
    defaults = dict(find_rule(loss).options)
    for name, value in given.items():
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise _refuse(f"loss_options: {loss} has no {name!r}; it has {known}")
        if not math.isfinite(value):
            raise _refuse(f"loss_options: {name} is {value}; it must be finite")
    options = {**defaults, **given}
    low, high = options.get("clip_low_threshold", 0), options.get("clip_high_threshold", 0)
    if low > high:
        raise _refuse(f"loss_options: clip_low_threshold {low} is above clip_high_threshold {high}")
    return options


def decode_sequence(
    place: int, raw: RawSequence, loss: str, limits: SequenceLimits
) -> TargetSequence:
    """Return a sequence as it is trained on; messages name it by its place in the batch.

    Raises OperationRefused BAD_BATCH."""
    rule, where = find_rule(loss), f"sequence {place}"
    token_ids = _decode(raw.token_ids, "<i4", f"{where}: token_ids")
    length, several = len(token_ids), max(raw.targets, 1)
    if not 0 < length <= limits.max_model_len:
        most = limits.max_model_len
        raise _refuse(f"{where} has {length} tokens; expected 1 to policy.max_model_len, {most}")
    if raw.targets < 0 or (several > 1 and not rule.several):
        raise _refuse(f"{where}: {raw.targets} targets at each position; {loss} takes 1")
    shape = (length,) if several == 1 else (length, several)
    target_ids = _shaped(raw.target_ids, "<i8", shape, f"{where}: target_ids")
    _check_ids(token_ids, limits.vocabulary, f"{where}: token_ids")
    _check_ids(target_ids, limits.vocabulary, f"{where}: target_ids")
    _check_names(raw.inputs, loss, rule, where)
    inputs = {
        name: _decode_numbers(data, shape, f"{where}: inputs[{name!r}]")
        for name, data in raw.inputs.items()
    }
    if "mask" in rule.optional:
        # So that sequences with and without one fit into a batch.
        inputs.setdefault("mask", np.ones(shape, np.float32))
    return TargetSequence(token_ids.astype(np.int32), target_ids.astype(np.int64), inputs)


def check_update(update: AdamUpdate) -> None:
    """Raise OperationRefused BAD_SETTINGS for settings that AdamW cannot take."""
    valid = {
        "learning_rate": update.learning_rate >= 0,
        "beta1": 0 <= update.beta1 < 1,
        "beta2": 0 <= update.beta2 < 1,
        "eps": update.eps > 0,
        "weight_decay": update.weight_decay >= 0,
        "grad_clip_norm": update.grad_clip_norm >= 0,
    }
    bounds = {"beta1": "from 0 to below 1", "beta2": "from 0 to below 1", "eps": "above 0"}
    for name, is_valid in valid.items():
        value = getattr(update, name)
        if not is_valid or not math.isfinite(value):
            expected = bounds.get(name, "0 or more")
            raise OperationRefused("BAD_SETTINGS", f"{name} is {value}; expected {expected}")


def _check_names(inputs: Mapping[str, bytes], loss: str, rule: LossRule, where: str) -> None:
    missing = [name for name in rule.required if name not in inputs]
    if missing:
        raise _refuse(f"{where} has no {missing[0]!r}; {loss} needs {', '.join(rule.required)}")
    known = (*rule.required, *rule.optional)
    if unknown := [name for name in inputs if name not in known]:
        raise _refuse(f"{where}: {loss} takes no {unknown[0]!r}; it takes {', '.join(known)}")


def _check_ids(ids: NDArray[Any], vocabulary: int, what: str) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        value = ids.reshape(-1)[outside[0]]
        raise _refuse(
            f"{what} has {value}, but ids of this vocabulary go from 0 to {vocabulary - 1}"
        )


def _decode_numbers(data: bytes, shape: tuple[int, ...], what: str) -> NDArray[np.float32]:
    values = _shaped(data, "<f4", shape, what).astype(np.float32)
    if not np.isfinite(values).all():
        raise _refuse(f"{what} has numbers that are not finite")
    return values


def _shaped(data: bytes, dtype: str, shape: tuple[int, ...], what: str) -> NDArray[Any]:
    values = _decode(data, dtype, what)
    if len(values) != math.prod(shape):
        expected = " x ".join(map(str, shape))
        raise _refuse(f"{what} has {len(values)} values; expected {expected}")
    return values.reshape(shape)


def _decode(data: bytes, dtype: str, what: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise _refuse(f"{what} has {len(data)} bytes, not a multiple of {size}")
    return np.frombuffer(data, dtype)


def _refuse(message: str) -> OperationRefused:
    return OperationRefused("BAD_BATCH", message)
