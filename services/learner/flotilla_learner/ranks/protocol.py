"""Messages between the learner service and its rank processes. No torch, no pickle.

A frame is a little-endian uint32 length and that many bytes of JSON. Arrays go through one
safetensors file in shared memory, rewritten for every batch and read by every rank."""

import glob
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter
from safetensors import numpy as safetensors_numpy

from flotilla_common.domain.attempts import StopReason
from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_learner.types import (
    CheckpointFiles,
    Comparison,
    ExpertShape,
    Histogram,
    ModelInfo,
    Publication,
    Standing,
    StepResult,
    StepSettings,
    StepTokens,
    TeacherScores,
    TrainBatch,
    TrainSequence,
    TurnTokens,
    VersionMismatch,
)

HEADER = struct.Struct("<I")
# A manifest of 100,000 tensors fits; anything larger is a corrupted channel.
MAX_FRAME_BYTES = 64 << 20
# Exit code of a child whose parent is gone.
ORPHANED_EXIT_CODE = 3

# Of the names of arrays that are files of pictures.
_PICTURE = "picture."
# Names of a sequence's arrays of its teacher.
_TEACHER = ("teacher", "teacher_ids", "teacher_top")

Message = dict[str, Any]

# Results of plain values.
COMPARISON, CHECKPOINT = TypeAdapter(Comparison), TypeAdapter(CheckpointFiles)
_BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
PICTURES = TypeAdapter(tuple[ShownPicture, ...], config=_BASE64)


class ChannelError(Exception):
    """The other side sent something that is not a frame."""


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """Return one message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Return the length of the body that follows. Raises ChannelError if it is impossible."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame claims {length} bytes: the channel is corrupted")
    return length


def decode_body(body: bytes) -> Message:
    """Return the message in a frame's body."""
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ChannelError("a frame holds no JSON object")
    return message


def read_frame(stream: BinaryIO) -> Message | None:
    """Return the next message, or None at the end of the stream, even if it is cut off."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = stream.read(frame_length(header))
    return decode_body(body) if body.endswith(b"}") else None


# Number of files through which publications rotate.
SLOT_COUNT = 3


def slot_paths(folder: Path, name: str) -> tuple[Path, ...]:
    """Return the files that hold a run's publications; `name` is `shared_memory.shared_name`."""
    return tuple(folder / f"{name}-slot{k}.safetensors" for k in range(SLOT_COUNT))


def batch_path(folder: Path, name: str) -> Path:
    """Return the shared-memory file that holds the batch on its way to the ranks."""
    return folder / f"{name}-batch.safetensors"


def comparison_path(folder: Path, name: str) -> Path:
    """Return the same for a batch that is only compared."""
    return folder / f"{name}-comparison.safetensors"


def token_path(folder: Path, name: str, step: int) -> Path:
    """Return the shared-memory file for a step's `StepTokens` on their way out of the rank."""
    return folder / f"{name}-tokens-{step}.safetensors"


def rendezvous_path(folder: Path, name: str) -> Path:
    """Return the file over which ranks meet; it must not exist when they start."""
    return folder / f"{name}-rendezvous"


def remove_stale_files(folder: Path, name: str) -> None:
    """Remove the files that an earlier learner of the same run left in shared memory."""
    alone = (
        batch_path(folder, name),
        comparison_path(folder, name),
        rendezvous_path(folder, name),
    )
    tokens = folder.glob(f"{glob.escape(name)}-tokens-*.safetensors")
    for path in (*slot_paths(folder, name), *alone, *tokens):
        path.unlink(missing_ok=True)


def write_batch(path: Path, batch: TrainBatch) -> Message:
    """Write the arrays to `path`; the returned plain values complete them."""
    sequences = batch.sequences
    files = {
        f"{_PICTURE}{name}": np.frombuffer(data, np.uint8) for name, data in batch.pictures.items()
    }
    safetensors_numpy.save_file(_to_arrays(sequences) | files, path)
    return {
        "step": batch.step,
        "path": str(path),
        "lengths": [len(s.token_ids) for s in sequences],
        "group_id": [s.group_id for s in sequences],
        "attempt_index": [s.attempt_index for s in sequences],
        "reward": [s.reward for s in sequences],
        "temperature": [s.temperature for s in sequences],
        "staleness": [s.staleness for s in sequences],
        "stop_reason": [s.stop_reason.value for s in sequences],
        "pictures": [[[p.sha256, p.grid, p.offset] for p in s.pictures] for s in sequences],
        "canary": [s.canary for s in sequences],
        "turns": [s.turns for s in sequences],
        "named_rewards": [dict(s.named_rewards) for s in sequences],
        "settings": asdict(batch.settings),
        "imitated": batch.imitated,
    }


def _to_arrays(sequences: Sequence[TrainSequence]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": _concat_arrays([s.token_ids for s in sequences], np.int32),
        "policy_mask": _concat_arrays([s.policy_mask for s in sequences], np.uint8),
        "behaviour_logprobs": _concat_arrays([s.behaviour_logprobs for s in sequences], np.float32),
    }
    named = {f"experts.{index}": each.experts for index, each in enumerate(sequences)}
    named |= {f"candidates.{index}": each.candidates for index, each in enumerate(sequences)}
    for index, sequence in enumerate(sequences):
        if (scores := sequence.teacher) is not None:
            taught = (scores.logprobs, scores.top_ids, scores.top_logprobs)
            named |= {f"{n}.{index}": a for n, a in zip(_TEACHER, taught, strict=True)}
    return arrays | {
        name: np.ascontiguousarray(array) for name, array in named.items() if array is not None
    }


def read_batch(message: Message) -> TrainBatch:
    """Return the batch that `write_batch` described."""
    return _assemble_batch(message, safetensors_numpy.load_file(message["path"]))


def pack_batch(message: Message) -> bytes:
    """Return the same batch as bytes, for ranks that cannot read the file."""
    return encode_frame(message) + Path(message["path"]).read_bytes()


def unpack_batch(packed: bytes) -> TrainBatch:
    """Invert `pack_batch`."""
    end = HEADER.size + frame_length(packed[: HEADER.size])
    message = decode_body(packed[HEADER.size : end])
    return _assemble_batch(message, safetensors_numpy.load(packed[end:]))


def _assemble_batch(message: Message, arrays: Mapping[str, NDArray[Any]]) -> TrainBatch:
    lengths = message["lengths"]
    columns = zip(
        message["group_id"],
        message["attempt_index"],
        message["reward"],
        _split_array(arrays["token_ids"], lengths),
        _split_array(arrays["policy_mask"].astype(np.bool_), lengths),
        _split_array(arrays["behaviour_logprobs"], lengths),
        message["temperature"],
        message["staleness"],
        [StopReason(reason) for reason in message["stop_reason"]],
        [arrays.get(f"experts.{index}") for index in range(len(lengths))],
        [tuple(_to_place(*place) for place in places) for places in message["pictures"]],
        message["canary"],
        [tuple(TurnTokens(*turn) for turn in turns) for turns in message["turns"]],
        message["named_rewards"],
        [arrays.get(f"candidates.{index}") for index in range(len(lengths))],
        [_to_scores(arrays, index) for index in range(len(lengths))],
        strict=True,
    )
    sequences = tuple(TrainSequence(*column) for column in columns)
    files = {
        name.removeprefix(_PICTURE): array.tobytes()
        for name, array in arrays.items()
        if name.startswith(_PICTURE)
    }
    settings = StepSettings(**message["settings"])
    return TrainBatch(message["step"], sequences, settings, files, message["imitated"])


def _to_scores(arrays: Mapping[str, NDArray[Any]], index: int) -> TeacherScores | None:
    found = [arrays.get(f"{name}.{index}") for name in _TEACHER]
    logprobs, top_ids, top_logprobs = found
    if logprobs is None or top_ids is None or top_logprobs is None:
        return None
    return TeacherScores(logprobs, top_ids, top_logprobs)


def _to_place(sha256: str, grid: list[int], offset: int) -> PlacedPicture:
    frames, high, wide = grid
    return PlacedPicture(sha256, (frames, high, wide), offset)


def _concat_arrays(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _split_array(joined: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    ends = np.cumsum([0, *lengths], dtype=np.int64).tolist()
    return [joined[start:end] for start, end in pairwise(ends)]


def write_tokens(path: Path, tokens: StepTokens) -> None:
    """Write a step's token values. Raises OSError and SafetensorError if there is no room."""
    arrays: dict[str, NDArray[Any]] = {
        "standings": np.array(tokens.standings, np.uint8),
        "lengths": np.array([len(values) for values in tokens.advantages], np.int64),
        "advantages": _concat_arrays(list(tokens.advantages), np.float32),
        "logprobs": _concat_arrays(list(tokens.logprobs), np.float32),
        "entropy": _concat_arrays(list(tokens.entropy), np.float32),
        "corrections": _concat_arrays(list(tokens.corrections), np.float32),
    }
    safetensors_numpy.save_file(arrays, path)


def read_tokens(path: Path) -> StepTokens:
    """Read the result of `write_tokens`."""
    arrays = safetensors_numpy.load_file(path)
    lengths = arrays["lengths"].tolist()
    names = ("advantages", "logprobs", "entropy", "corrections")
    columns = [tuple(_split_array(arrays[name], lengths)) for name in names]
    return StepTokens(tuple(Standing(each) for each in arrays["standings"].tolist()), *columns)


def encode_model_info(info: ModelInfo) -> Message:
    return {**asdict(info), "reference": info.reference.hex() if info.reference else None}


def decode_model_info(message: Message) -> ModelInfo:
    reference, experts = message["reference"], message["experts"]
    return ModelInfo(
        parameters=message["parameters"],
        vocab_size=message["vocab_size"],
        step=message["step"],
        reference=bytes.fromhex(reference) if reference else None,
        experts=ExpertShape(**experts) if experts else None,
        banned_ids=tuple(message["banned_ids"]),
    )


def encode_step_result(result: StepResult) -> Message:
    """Encode everything but `tokens`, which are in `token_file`."""
    return {
        "metrics": dict(result.metrics),
        "seconds": result.seconds,
        "skipped": result.skipped,
        "histograms": {name: asdict(values) for name, values in result.histograms.items()},
        # JSON keys are strings only.
        "versions": [[version, asdict(found)] for version, found in result.versions.items()],
        "token_file": str(result.token_file) if result.token_file else None,
    }


def decode_step_result(message: Message) -> StepResult:
    return StepResult(
        metrics=message["metrics"],
        seconds=message["seconds"],
        skipped=message["skipped"],
        histograms={
            name: Histogram(tuple(values["edges"]), tuple(values["counts"]))
            for name, values in message["histograms"].items()
        },
        versions={version: VersionMismatch(**found) for version, found in message["versions"]},
        token_file=Path(message["token_file"]) if message["token_file"] else None,
    )


def encode_publication(publication: Publication) -> Message:
    return {
        "version": publication.version,
        "fingerprint": publication.fingerprint.hex(),
        "manifest": [
            [e.name, e.dtype, list(e.shape), e.offset_bytes, e.checksum]
            for e in publication.manifest
        ],
        "total_bytes": publication.total_bytes,
        "path": str(publication.path),
        "canary_token_ids": publication.canary_token_ids.tolist(),
        # float32 to float64 and back is exact.
        "canary_logprobs": publication.canary_logprobs.tolist(),
        "canary_pictures": PICTURES.dump_python(publication.canary_pictures, mode="json"),
    }


def decode_publication(message: Message) -> Publication:
    return Publication(
        version=message["version"],
        fingerprint=bytes.fromhex(message["fingerprint"]),
        manifest=tuple(
            TensorEntry(name, dtype, tuple(shape), offset, checksum)
            for name, dtype, shape, offset, checksum in message["manifest"]
        ),
        total_bytes=message["total_bytes"],
        path=Path(message["path"]),
        canary_token_ids=np.array(message["canary_token_ids"], np.int32),
        canary_logprobs=np.array(message["canary_logprobs"], np.float32),
        canary_pictures=PICTURES.validate_python(message["canary_pictures"]),
    )
