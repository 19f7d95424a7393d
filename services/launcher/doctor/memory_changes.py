"""The smallest change of a spec after which a run fits into GPUs of one size. Pure."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from services.launcher.doctor.memory_estimate import format_gib
from services.launcher.doctor.memory_needs import MemoryNeeds

_MOST_RANKS = 1024
_MOST_WORKERS = 64
_SMALL_CHUNK = 256
# Step between tried context lengths, in tokens.
_LENGTH_STEP = 1024
_Fits = Callable[[MemoryNeeds], bool]


def suggest_for_trainer(needs: MemoryNeeds, gpu: int) -> str:
    """Name the change after which a rank fits into a GPU of `gpu` bytes.

    The fewest and cheapest settings come first, then more ranks, a shorter context and a larger
    GPU."""

    def fits(changed: MemoryNeeds) -> bool:
        return changed.trainer.device <= gpu

    settings = list(_trainer_settings(needs))
    for count in range(1, len(settings) + 1):
        for chosen in combinations(settings, count):
            keys = {key: value for each in chosen for key, value in each.items()}
            if fits(needs.with_rank(**keys)):
                return f"set {_format_keys('learner.rank', keys)}"
    every = {key: value for each in settings for key, value in each.items()}
    larger = f"take GPUs of {format_gib(needs.trainer.device)} or more"
    return _more_ranks(needs, every, fits) or _shorter(needs, every, fits) or larger


def suggest_for_engine(needs: MemoryNeeds, gpu: int) -> str:
    """Name the change after which one full-length sequence fits beside an engine's weights."""

    def fits(changed: MemoryNeeds) -> bool:
        return changed.engine.kv_cache_bytes(gpu) >= changed.engine.sequence

    workers = needs.rollout["engine"]["tensor_parallel"] * 2
    while workers <= _MOST_WORKERS:
        if fits(needs.with_engine(tensor_parallel=workers)):
            return f"set rollout.engine.tensor_parallel = {workers}"
        workers *= 2
    needed = needs.engine.weights + needs.engine.sequence
    return (
        f"lower policy.max_model_len, or take GPUs of {format_gib(needed / needs.engine.share)} or"
        " more"
    )


def _trainer_settings(needs: MemoryNeeds) -> Iterator[Mapping[str, object]]:
    """Yield changes of `[learner.rank]` that cost no GPU, the cheapest first."""
    rank = needs.learner["rank"]
    if rank["pack_tokens"] > needs.max_len:
        yield {"pack_tokens": needs.max_len}
    if rank["head_chunk"] > _SMALL_CHUNK:
        yield {"head_chunk": _SMALL_CHUNK}
    if rank["processes"] > 1 and not rank["shard"]:
        yield _splitting(needs)
    kept = rank["gradient_checkpointing"]
    # `auto` counts as the setting that keeps least.
    if kept == "off" and not rank["compile"]:
        yield {"gradient_checkpointing": "selective"}
    if kept in ("off", "selective"):
        yield {"gradient_checkpointing": "full"}
    if rank["device"] == "cuda" and not rank["offload_activations"]:
        # Offloading applies to the activations that `full` keeps.
        full = {} if kept == "full" else {"gradient_checkpointing": "full"}
        yield {**full, "offload_activations": True}
    if not rank["offload_optimizer"]:
        yield {"offload_optimizer": True}


def _splitting(needs: MemoryNeeds) -> dict[str, object]:
    """Return the keys of a learner whose ranks split the model."""
    several = needs.learner["rank"]["nodes"] > 1
    return {"shard": True, **({"shard_within_node": True} if several else {})}


def _more_ranks(needs: MemoryNeeds, every: Mapping[str, object], fits: _Fits) -> str:
    """Name the fewest ranks that fit, with today's settings or with all that save memory."""
    found = [_fewest_ranks(needs, keys, fits) for keys in ({}, every)]
    there = [changed for changed in found if changed is not None]
    if not there:
        return ""
    changed = min(there, key=lambda keys: keys["processes"])
    return f"set {_format_keys('learner.rank', changed)}, on as many GPUs"


def _fewest_ranks(
    needs: MemoryNeeds, keys: Mapping[str, object], fits: _Fits
) -> dict[str, Any] | None:
    split = needs.with_rank(**{**keys, **_splitting(needs)})
    ranks = range(needs.learner["rank"]["processes"] + 1, _MOST_RANKS + 1)
    # More ranks are smaller.
    place = bisect_left(ranks, True, key=lambda count: fits(split.with_rank(processes=count)))
    if place == len(ranks):
        return None
    then, now = {**split.learner["rank"], "processes": ranks[place]}, needs.learner["rank"]
    return {key: value for key, value in then.items() if value != now[key]}


def _shorter(needs: MemoryNeeds, every: Mapping[str, object], fits: _Fits) -> str:
    for length in range(needs.max_len // _LENGTH_STEP * _LENGTH_STEP, 0, -_LENGTH_STEP):
        shorter = replace(needs.with_rank(**every), max_len=length)
        if fits(shorter.with_rank(pack_tokens=length)):
            keys = {**every, "pack_tokens": length}
            return f"set policy.max_model_len = {length} and {_format_keys('learner.rank', keys)}"
    return ""


def _format_keys(table: str, keys: Mapping[str, object]) -> str:
    parts = [f"{table}.{key} = {json.dumps(value)}" for key, value in keys.items()]
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if parts[1:] else parts[0]
