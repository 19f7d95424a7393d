"""Bodies as the SDK writes them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from flotilla.tinker.v1 import tinker_wire_pb2 as pb

ADVANTAGES = {"logprobs": [-1.0, -2.0, -3.0], "advantages": [0.0, 1.0, 1.0]}


def make_tensor(values: Any, kind: str | None = None) -> pb.Tensor:
    array = np.array(values)
    ints = array.dtype.kind == "i" and kind != "f4"
    array = array.astype("<i8" if ints else "<f4")
    dtype = pb.ARRAY_TYPE_INT64 if ints else pb.ARRAY_TYPE_FLOAT32
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def make_sparse(dense: Any, dtype: str) -> pb.Tensor:
    """Return the compressed rows of a matrix."""
    array = np.array(dense, dtype)
    rows, columns = np.nonzero(array)
    starts = np.searchsorted(rows, np.arange(len(array) + 1)).astype("<i8")
    return pb.Tensor(
        sparse_csr=pb.SparseRows(
            values=array[rows, columns].tobytes(),
            crow_indices=starts.tobytes(),
            col_indices=columns.astype("<i8").tobytes(),
        ),
        dtype=pb.ARRAY_TYPE_INT64 if array.dtype.kind == "i" else pb.ARRAY_TYPE_FLOAT32,
        shape=array.shape,
    )


def make_chunk(tokens: Sequence[int]) -> pb.Chunk:
    data = np.array(tokens, "<i4").tobytes()
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=data))


def make_datum(tokens: Sequence[int] = (5, 6, 7), /, **inputs: Any) -> pb.Datum:
    datum = pb.Datum(model_input=[make_chunk(tokens)])
    for name, values in {"target_tokens": [6, 7, 8], **inputs}.items():
        tensor = values if isinstance(values, pb.Tensor) else make_tensor(values)
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return datum


def make_loss_request(
    loss: str = "cross_entropy", data: Sequence[pb.Datum] | None = None, **fields: Any
) -> pb.ForwardBackwardRequest:
    given: dict[str, Any] = {"model_id": "s1:train:0", "seq_id": 4, **fields}
    return pb.ForwardBackwardRequest(
        loss_fn=loss, data=[make_datum()] if data is None else data, **given
    )


def make_loss_body(*args: Any, **fields: Any) -> bytes:
    return make_loss_request(*args, **fields).SerializeToString()


def make_sample_body(**fields: Any) -> bytes:
    """Return a body with all fields that the SDK sends."""
    params = {"temperature": 1, "top_k": -1, "top_p": 1, "max_tokens": 4}
    given = {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_session_id": "s1:sample:0",
        "seq_id": 0,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **fields,
    }
    given["sampling_params"] = {**params, **fields.get("sampling_params", {})}
    return msgspec.json.encode({k: v for k, v in given.items() if v is not None})
