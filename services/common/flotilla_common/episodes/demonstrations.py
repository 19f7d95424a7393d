"""Files of demonstrations: sequences to imitate, with exact token ids and the mask of the trained
ones.

One `.npz` file without pickle, not compressed. `index` holds the bytes of a JSON object: format,
writer, tokenizer, source, selection and counts, and for each sequence its episode, task and length.
`token_ids` (int32) and `trained` (bool) hold the tokens of all sequences, end to end; `rewards`
(float64) has one number a sequence. The same episodes give the same bytes."""

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.files.durable_files import sync_path
from flotilla_common.process.own_version import own_version

FORMAT = 2


class DemonstrationsError(Exception):
    """A file of demonstrations cannot be read; the message names it, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One sequence of an episode: `token_ids` [n], and `trained` [n], true where a policy wrote the
    token. `source` is the run of the episode, `place` the sequence's in the file that it was read
    from."""

    source: str
    key: AttemptKey
    task_key: str
    reward: float
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    place: int = 0


@dataclass(frozen=True, slots=True)
class DemonstrationHead:
    """What all sequences of a file have in common.

    `tokenizer` is the digest, in hex, of the tokenizer and chat template that the ids are of.
    `selection` are the rules by which episodes were accepted, `counts` the numbers of episodes by
    fate, and of sequences and tokens; `pruned` names the episodes that were accepted, but whose
    tokens are no longer kept, and `left_out` what was not rendered as it was said, with the
    reason."""

    source: str
    tokenizer: str
    selection: Mapping[str, Any]
    counts: Mapping[str, int]
    pruned: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DemonstrationFile:
    """The content of a file, and its SHA-256 in hex."""

    head: DemonstrationHead
    sequences: tuple[Demonstration, ...]
    sha256: str


def write_demonstrations(
    path: Path, head: DemonstrationHead, sequences: Sequence[Demonstration]
) -> None:
    """Write a file; it exists whole, and is on disk, or not at all. Raises OSError."""
    index = {
        "format": FORMAT,
        "written_by": own_version().to_dict(),
        **asdict(head),
        "sequences": [
            [each.source, *_key_fields(each.key), each.task_key, len(each.token_ids)]
            for each in sequences
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            np.savez(
                file,
                index=np.frombuffer(json.dumps(index).encode(), np.uint8),
                rewards=np.array([each.reward for each in sequences], np.float64),
                token_ids=_concat([each.token_ids for each in sequences], np.int32),
                trained=_concat([each.trained for each in sequences], np.bool_),
            )
        sync_path(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_demonstrations(path: Path) -> DemonstrationFile:
    """Read a file whole. Raises DemonstrationsError."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                index: dict[str, Any] = json.loads(arrays["index"].tobytes())
                columns = [arrays[name] for name in ("rewards", "token_ids", "trained")]
        if index["format"] != FORMAT:
            raise DemonstrationsError(
                f"{path} has format {index['format']!r}, but {own_version()} reads {FORMAT}: make"
                " it again with `flotilla sft`"
            )
        return DemonstrationFile(_read_head(index), _read_sequences(index, *columns), sha256)
    except FileNotFoundError:
        raise DemonstrationsError(
            f"{path} does not exist: make it with `flotilla sft SPEC --from RUN`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DemonstrationsError(
            f"{path} is no file of demonstrations, or damaged: {error}; make it again with"
            " `flotilla sft`"
        ) from error


def episode_name(key: AttemptKey) -> str:
    """Return the name of an episode in its run: GROUP/ATTEMPT/TRY."""
    return "/".join(map(str, _key_fields(key)))


def _key_fields(key: AttemptKey) -> tuple[str, int, int]:
    return key.group_id, key.attempt_index, key.attempt_try


def _read_head(index: Mapping[str, Any]) -> DemonstrationHead:
    counts = {str(name): int(count) for name, count in index["counts"].items()}
    pruned, left_out = (tuple(map(str, index[name])) for name in ("pruned", "left_out"))
    return DemonstrationHead(
        *(str(index["source"]), str(index["tokenizer"]), index["selection"]),
        *(counts, pruned, left_out),
    )


def _read_sequences(
    index: Mapping[str, Any],
    rewards: NDArray[np.float64],
    token_ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
) -> tuple[Demonstration, ...]:
    """Return the sequences. Raises ValueError if lengths differ, or nothing predicts a token."""
    rows = index["sequences"]
    ends = np.cumsum([0, *(row[-1] for row in rows)], dtype=np.int64).tolist()
    if not ends[-1] == len(token_ids) == len(trained) or len(rewards) != len(rows):
        raise ValueError(f"it names {ends[-1]} tokens and {len(rows)} sequences, and holds others")
    if any(trained[start] for start, end in pairwise(ends) if end > start):
        raise ValueError("the first token of a sequence is trained, and nothing predicts it")
    return tuple(
        Demonstration(
            *(source, AttemptKey(group, attempt, number), task, float(reward)),
            *(token_ids[start:end].astype(np.int32), trained[start:end].astype(np.bool_), place),
        )
        for place, ((source, group, attempt, number, task, _), reward, (start, end)) in enumerate(
            zip(rows, rewards, pairwise(ends), strict=True)
        )
    )


def _concat(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
