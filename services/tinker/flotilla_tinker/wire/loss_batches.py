"""Batches to train on, and their results."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_tinker.types import LossBatch, LossResult, LossSequence
from flotilla_tinker.wire.tensors import batch_arrays, check_sizes, read_tensor, read_tokens
from flotilla_tinker.wire.wire_error import WireError

CROSS_ENTROPY = "cross_entropy"
TARGETS = "target_tokens"
_POLICY_INPUTS = ("logprobs", "advantages")
# By loss: inputs that it needs beside its targets, and those that it may have.
_INPUTS = {
    CROSS_ENTROPY: ((), ("weights",)),
    "importance_sampling": (_POLICY_INPUTS, ("mask",)),
    "ppo": (_POLICY_INPUTS, ("mask",)),
    "cispo": (_POLICY_INPUTS, ("mask",)),
    "dro": (_POLICY_INPUTS, ("mask",)),
    "gspo": ((*_POLICY_INPUTS, "sequence_ratio_mask"), ("mask",)),
}
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_OPTIONS = {"ppo": _CLIPS, "cispo": _CLIPS, "gspo": _CLIPS, "dro": ("beta",)}
STABLE_REINFORCE = (
    "stable_reinforce is not offered: its formula is not public. Start the recipe with"
    " loss_fn=importance_sampling"
)
_REFUSED = {
    "stable_reinforce": STABLE_REINFORCE,
    "custom": (
        "custom losses do not run on this server: forward_backward_custom computes them in the"
        " client, from a function instead of a LossHandle"
    ),
}
_OUTPUT = "scalar"


def read_loss_order(body: bytes) -> tuple[str, int, LossBatch]:
    """Read a body of forward_backward: the model, the order's number, and the batch. Raises
    WireError."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise WireError("the body is no ForwardBackwardRequest of the SDK's protobuf") from error
    if request.loss_fn in _REFUSED:
        raise WireError(_REFUSED[request.loss_fn])
    if request.loss_fn not in _INPUTS:
        raise WireError(f"loss_fn is {request.loss_fn!r}; known: {', '.join(sorted(_INPUTS))}")
    if not request.data:
        raise WireError("data is empty")
    check_sizes(tensor for datum in request.data for tensor in datum.loss_fn_inputs.values())
    batch = LossBatch(
        loss=request.loss_fn,
        options=_read_options(request),
        sequences=[
            _read_datum(datum, request.loss_fn, f"data[{number}]")
            for number, datum in enumerate(request.data)
        ],
        forward_only=request.forward_only,
    )
    return request.model_id, request.seq_id, batch


def read_loss_place(body: bytes) -> tuple[str, int] | None:
    """Return the model and number of an order whatever else is wrong with it; None if it has
    none."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return None
    return request.model_id, request.seq_id


def read_forward_backward(body: bytes) -> LossBatch:
    """Read the batch of a body of forward_backward. Raises WireError."""
    return read_loss_order(body)[2]


def _read_options(request: pb.ForwardBackwardRequest) -> Mapping[str, float]:
    given = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise WireError(f"loss_fn_config.{name}: expected a number")
        given[name] = value.number
    known = _OPTIONS.get(request.loss_fn, ())
    for name, number in given.items():
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has none"
            raise WireError(f"loss_fn_config.{name}: {request.loss_fn} {has}")
        if not math.isfinite(number):
            raise WireError(f"loss_fn_config.{name} is {number}")
    return given


def _read_datum(datum: pb.Datum, loss: str, where: str) -> LossSequence:
    tokens = _read_input(datum, where)
    inputs = {
        name: read_tensor(tensor, f"{where}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = inputs.pop(TARGETS, None)
    if targets is None:
        raise WireError(f"{where}.loss_fn_inputs.{TARGETS} is missing")
    if targets.dtype.kind != "i":
        raise WireError(f"{where}.loss_fn_inputs.{TARGETS}: its dtype is float32; send int64")
    most = 2 if loss == CROSS_ENTROPY else 1
    if not 1 <= targets.ndim <= most or len(targets) != len(tokens) or not targets.size:
        shape = "[N] or [N, K]" if most == 2 else "[N]"
        raise WireError(
            f"{where}.loss_fn_inputs.{TARGETS}: its shape is {list(targets.shape)}; {loss} takes"
            f" {shape}, with the N = {len(tokens)} of model_input"
        )
    _check_inputs(inputs, targets.shape, loss, f"{where}.loss_fn_inputs")
    if loss == CROSS_ENTROPY:
        inputs.setdefault("weights", np.ones(targets.shape, np.float32))
    return LossSequence(tokens, targets.astype(np.int64), inputs)


def _read_input(datum: pb.Datum, where: str) -> NDArray[np.int32]:
    parts: list[NDArray[np.int32]] = []
    for number, chunk in enumerate(datum.model_input):
        place, kind = f"{where}.model_input[{number}]", chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise WireError(f"{place} is {kind or 'empty'}: this server trains on text only")
        parts.append(read_tokens(chunk.encoded_text.tokens, place))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise WireError(f"{where}.model_input has no tokens")
    return tokens


def _check_inputs(
    inputs: Mapping[str, NDArray[Any]], shape: tuple[int, ...], loss: str, where: str
) -> None:
    needed, optional = _INPUTS[loss]
    for name in needed:
        if name not in inputs:
            raise WireError(f"{where}.{name} is missing: {loss} needs it")
    for name, values in inputs.items():
        if name not in needed and name not in optional:
            known = ", ".join((TARGETS, *needed, *optional))
            raise WireError(f"{where}.{name}: {loss} does not take it; it takes {known}")
        if values.dtype.kind != "f":
            raise WireError(f"{where}.{name}: its dtype is {values.dtype.name}; send float32")
        if values.shape != shape:
            raise WireError(
                f"{where}.{name}: its shape is {list(values.shape)}, that of {TARGETS}"
                f" {list(shape)}"
            )
        if not np.isfinite(values).all():
            raise WireError(f"{where}.{name} has values that are not finite")


def write_loss_result(result: LossResult, batch: LossBatch) -> bytes:
    """Write the result of a batch: a record for each run of sequences with as many targets."""
    logprobs = [
        values.reshape(sequence.target_ids.shape)
        for values, sequence in zip(result.logprobs, batch.sequences, strict=True)
    ]
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT, metrics=result.metrics)
    for _, run in groupby(logprobs, key=lambda values: values.shape[1:]):
        arrays = [*run]
        record = pb.ArrayRecord(type_tag=_OUTPUT, num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(batch_arrays(arrays))
        message.loss_fn_outputs.append(record)
    return message.SerializeToString()
