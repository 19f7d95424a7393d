"""The trainer's values for each policy token of a step, in a compressed file per step.

`token_stats/step_000012.npz` holds `index`, the bytes of a JSON object, and one array per kind of
value, [policy tokens of all sequences], in batch order: attempts in the plan's order, then their
sequences. Values that were not computed are NaN. No pickle."""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.process.own_version import own_version

FORMAT = 2
FOLDER = "token_stats"
# Attempt, and the number of its sequence.
SequenceKey = tuple[AttemptKey, int]


class TokenStatsError(Exception):
    """The values of a step cannot be read, or belong to other attempts; the message gives the
    reason."""


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Values of one sequence; arrays are [policy tokens].

    `why_not` is empty for a trained sequence. `logprobs` are those of the policy at the start of
    the step and `entropy` is in nats; `weights` are those that corrections gave the token's loss in
    the first epoch, 0 if they masked it. All three are NaN if the step did not compute them."""

    trained: bool
    why_not: str
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float16]
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Values of one step. `base_version` is the policy at its start."""

    step: int
    base_version: int
    sequences: dict[SequenceKey, SequenceStats]


@dataclass(frozen=True, slots=True)
class _IndexRow:
    """A sequence in the index of a file."""

    group_id: str
    attempt_index: int
    attempt_try: int
    sequence_index: int
    policy_tokens: int
    trained: bool
    why_not: str


def stats_path(run_dir: Path, step: int) -> Path:
    """Return the file of a step."""
    return run_dir / FOLDER / f"step_{step:06d}.npz"


def encode_stats(stats: StepStats) -> bytes:
    """Encode a file."""
    rows = [
        _IndexRow(
            *(key.group_id, key.attempt_index, key.attempt_try, index),
            len(each.advantages),
            each.trained,
            each.why_not,
        )
        for (key, index), each in stats.sequences.items()
    ]
    head = {"format": FORMAT, "step": stats.step, "base_version": stats.base_version}
    writer = own_version().to_dict()
    index = json.dumps(
        {**head, "written_by": writer, "sequences": [asdict(row) for row in rows]}
    ).encode()
    values = list(stats.sequences.values())
    file = io.BytesIO()
    np.savez_compressed(
        file,
        index=np.frombuffer(index, np.uint8),
        advantages=_concat([each.advantages for each in values], np.float32),
        logprobs=_concat([each.logprobs for each in values], np.float32),
        entropy=_concat([each.entropy for each in values], np.float16),
        weights=_concat([each.weights for each in values], np.float32),
    )
    return file.getvalue()


def read_token_stats(path: Path) -> StepStats:
    """Read a file. Raises TokenStatsError if it is missing or damaged."""
    try:
        # Opened here, because numpy leaves a file open that is not an archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            index: dict[str, Any] = json.loads(arrays["index"].tobytes())
            if index["format"] != FORMAT:
                raise TokenStatsError(f"{path} has format {index['format']!r}, this reads {FORMAT}")
            columns = [arrays[name] for name in ("advantages", "logprobs", "entropy", "weights")]
        rows = [_IndexRow(**row) for row in index["sequences"]]
        split = [_split(column, [row.policy_tokens for row in rows]) for column in columns]
        return StepStats(
            int(index["step"]),
            int(index["base_version"]),
            {
                _key_of(row): SequenceStats(row.trained, row.why_not, *arrays)
                for row, *arrays in zip(rows, *split, strict=True)
            },
        )
    except FileNotFoundError:
        raise TokenStatsError(f"{path} does not exist: it was pruned, or never written") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise TokenStatsError(f"{path} is damaged: {error}") from error


def _key_of(row: _IndexRow) -> SequenceKey:
    return AttemptKey(row.group_id, row.attempt_index, row.attempt_try), row.sequence_index


def _concat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _split(array: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    if sum(lengths) != len(array):
        raise ValueError(f"{len(array)} numbers of {sum(lengths)} tokens")
    ends = np.cumsum([0, *lengths])
    return [array[start:end] for start, end in pairwise(ends)]
