"""Batches and scores of training at a caller's request, between the service and the ranks.

Plain values are in the message, arrays in safetensors files in shared memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors_numpy

from flotilla_learner.ranks import protocol
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence

_IDS, _TARGETS, _INPUT = "token_ids", "target_ids", "input."


def write_targets(path: Path, batch: TargetBatch) -> protocol.Message:
    """Write a batch's arrays to `path`; the returned plain values complete them."""
    sequences = batch.sequences
    arrays = {
        _IDS: np.concatenate([each.token_ids for each in sequences]),
        _TARGETS: _join([each.target_ids for each in sequences]),
        **{
            f"{_INPUT}{name}": _join([each.inputs[name] for each in sequences])
            for name in sequences[0].inputs
        },
    }
    safetensors_numpy.save_file(arrays, path)
    return {
        "path": str(path),
        "loss": batch.loss,
        "options": dict(batch.options),
        "shapes": [list(each.target_ids.shape) for each in sequences],
        "forward_only": batch.forward_only,
    }


def read_targets(message: protocol.Message) -> TargetBatch:
    """Return the batch that `write_targets` described."""
    arrays = safetensors_numpy.load_file(message["path"])
    shapes = message["shapes"]
    token_ids = _split(arrays.pop(_IDS), [shape[:1] for shape in shapes])
    target_ids = _split(arrays.pop(_TARGETS), shapes)
    inputs = {name.removeprefix(_INPUT): _split(each, shapes) for name, each in arrays.items()}
    sequences = [
        TargetSequence(token_ids[place], target_ids[place], _at(inputs, place))
        for place in range(len(shapes))
    ]
    return TargetBatch(message["loss"], message["options"], sequences, message["forward_only"])


def write_scores(path: Path, scores: TargetScores) -> protocol.Message:
    """Write the logprobs to `path`; the returned plain values complete them."""
    safetensors_numpy.save_file({"logprobs": _join(scores.logprobs)}, path)
    return {"path": str(path), "metrics": dict(scores.metrics)}


def read_scores(message: protocol.Message, batch: TargetBatch) -> TargetScores:
    """Return the scores of `batch` that `write_scores` described, and remove their file."""
    path = Path(message["path"])
    shapes = [each.target_ids.shape for each in batch.sequences]
    logprobs = _split(safetensors_numpy.load_file(path)["logprobs"], shapes)
    path.unlink()
    return TargetScores(logprobs, message["metrics"])


def _at(inputs: Mapping[str, list[NDArray[Any]]], place: int) -> dict[str, NDArray[np.float32]]:
    return {name: values[place] for name, values in inputs.items()}


def _join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([each.reshape(-1) for each in arrays])


def _split(joined: NDArray[Any], shapes: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(joined, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
