"""The service's part of the ranks' burn-in: its size, and the remedy if it fails."""

from dataclasses import dataclass

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ports import RankError

# Exit of a process that the kernel has killed, as when memory is short.
_KILLED = "was killed by signal 9"


class BurnInMemoryError(Exception):
    """The longest pack needs more memory than there is."""


@dataclass(frozen=True, slots=True)
class BurnInPeaks:
    """Memory used by a rank's burn-in, in bytes."""

    tokens: int
    seconds: float
    host: int
    # For tensors; 0 on a CPU.
    device: int


def burn_in_lengths(pack_tokens: int, max_model_len: int) -> list[int]:
    """Return the lengths of the sequences of the longest pack that a step can have."""
    if max_model_len >= pack_tokens:
        return [max_model_len]
    whole, rest = divmod(pack_tokens, max_model_len)
    # A row of one token has no policy token.
    return [max_model_len] * whole + ([rest] if rest > 1 else [])


def explain_failure(
    error: RankError, rank: RankConfig, max_model_len: int, *, fresh: bool
) -> Exception:
    """Return the error of a failed burn-in: ConfigError if it would fail again.

    A killed rank of a run that has made steps (not `fresh`) may have been bad luck."""
    message = str(error)
    # The end of the rank's log follows, which may describe an earlier start.
    first = message.partition("\n")[0]
    if BurnInMemoryError.__name__ not in first and not (fresh and _KILLED in first):
        return error
    return ConfigError(
        "the burn-in (the longest pack, forward and backward) has too little memory;"
        f" {smallest_change(rank, max_model_len)}: {message}"
    )


def smallest_change(rank: RankConfig, max_model_len: int) -> str:
    """Name the cheapest change of the configuration that takes less memory."""
    if rank.pack_tokens > max_model_len:
        return f"set learner.rank.pack_tokens = {max_model_len}, policy.max_model_len"
    if rank.gradient_checkpointing != "full":
        return 'set learner.rank.gradient_checkpointing = "full"'
    if rank.device == "cuda" and not rank.offload_activations:
        return "set learner.rank.offload_activations = true"
    if rank.processes > 1 and not rank.shard:
        return "set learner.rank.shard = true"
    if rank.device == "cuda" and not rank.offload_optimizer:
        return "set learner.rank.offload_optimizer = true"
    return "lower policy.max_model_len, or use more memory"
