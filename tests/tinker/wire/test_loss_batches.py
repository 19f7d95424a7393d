import re

import numpy as np
import pytest

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_tinker.types import LossResult
from flotilla_tinker.wire.loss_batches import (
    read_forward_backward,
    read_loss_order,
    write_loss_result,
)
from flotilla_tinker.wire.wire_error import WireError
from tests.tinker.wire.examples import (
    ADVANTAGES,
    make_chunk,
    make_datum,
    make_loss_body,
    make_sparse,
    make_tensor,
)


def test_a_batch_is_read_with_its_place_and_options() -> None:
    datum = make_datum(**ADVANTAGES)
    body = make_loss_body("ppo", [datum], loss_fn_config={"clip_low_threshold": 0.9})

    model_id, seq_id, batch = read_loss_order(body)

    assert (model_id, seq_id) == ("s1:train:0", 4)
    assert (batch.loss, batch.options) == ("ppo", {"clip_low_threshold": 0.9})
    assert not batch.forward_only
    (sequence,) = batch.sequences
    assert sequence.token_ids.tolist() == [5, 6, 7]
    assert sequence.target_ids.tolist() == [6, 7, 8]
    assert {name: values.tolist() for name, values in sequence.inputs.items()} == ADVANTAGES
    assert {values.dtype for values in sequence.inputs.values()} == {np.dtype(np.float32)}


def test_options_of_the_second_kind_replace_the_first() -> None:
    options = {"beta": pb.LossConfigValue(number=0.1)}
    body = make_loss_body(
        "dro", [make_datum(**ADVANTAGES)], loss_fn_config={"beta": 0.5}, loss_fn_config_v2=options
    )

    assert read_forward_backward(body).options == {"beta": 0.1}


def test_an_input_in_parts_is_one_sequence() -> None:
    datum = make_datum()
    datum.ClearField("model_input")
    datum.model_input.extend([make_chunk([5, 6]), make_chunk([7])])

    (sequence,) = read_forward_backward(make_loss_body(data=[datum])).sequences

    assert sequence.token_ids.tolist() == [5, 6, 7]


def test_cross_entropy_without_weights_counts_each_token_once() -> None:
    (sequence,) = read_forward_backward(make_loss_body()).sequences

    assert sequence.inputs["weights"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_a_position_may_be_dense_or_sparse(sparse: bool) -> None:
    targets, weights = [[6, 0], [0, 9], [8, 4]], [[1.0, 0.0], [0.0, -0.5], [0.25, 2.0]]
    given = {"target_tokens": make_tensor(targets), "weights": make_tensor(weights)}
    if sparse:
        given = {
            "target_tokens": make_sparse(targets, "<i8"),
            "weights": make_sparse(weights, "<f4"),
        }

    (sequence,) = read_forward_backward(make_loss_body(data=[make_datum(**given)])).sequences

    assert sequence.target_ids.tolist() == targets
    assert sequence.inputs["weights"].tolist() == weights


def test_a_forward_pass_is_told_apart() -> None:
    assert read_forward_backward(make_loss_body(forward_only=True)).forward_only


SPARSE = make_sparse([[1, 0], [0, 1], [1, 1]], "<i8")


def _sparse_with(**fields: bytes) -> pb.Tensor:
    changed = pb.Tensor()
    changed.CopyFrom(SPARSE)
    for name, value in fields.items():
        setattr(changed.sparse_csr, name, value)
    return changed


INT64, FLOAT32 = np.dtype("<i8"), pb.ARRAY_TYPE_FLOAT32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xff", "no ForwardBackwardRequest"),
        (make_loss_body("stable_reinforce"), "loss_fn=importance_sampling"),
        (make_loss_body("custom"), "forward_backward_custom computes them in the client"),
        (make_loss_body("hinge"), "loss_fn is 'hinge'; known: cispo, cross_entropy"),
        (make_loss_body(data=[]), "data is empty"),
        (make_loss_body(data=[pb.Datum()]), "data[0].model_input has no tokens"),
        (
            make_loss_body(data=[pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk())])]),
            "data[0].model_input[0] is image: this server trains on text only",
        ),
        (
            make_loss_body(data=[pb.Datum(model_input=[make_chunk([1])])]),
            "data[0].loss_fn_inputs.target_tokens is missing",
        ),
        (
            make_loss_body(data=[make_datum(target_tokens=[1.5])]),
            "its dtype is float32; send int64",
        ),
        (
            make_loss_body(data=[make_datum(), make_datum(target_tokens=[6, 7])]),
            "data[1].loss_fn_inputs.target_tokens: its shape is [2]; cross_entropy takes [N] or"
            " [N, K], with the N = 3",
        ),
        (
            make_loss_body("ppo", [make_datum(target_tokens=[[1], [2], [3]], **ADVANTAGES)]),
            "ppo takes [N], with the N = 3",
        ),
        (make_loss_body("ppo"), "loss_fn_inputs.logprobs is missing: ppo needs it"),
        (make_loss_body("gspo", [make_datum(**ADVANTAGES)]), "sequence_ratio_mask is missing"),
        (
            make_loss_body(data=[make_datum(advantages=[1.0, 1.0, 1.0])]),
            "advantages: cross_entropy does not take it; it takes target_tokens, weights",
        ),
        (make_loss_body(data=[make_datum(weights=[1, 1, 1])]), "its dtype is int64; send float32"),
        (
            make_loss_body(data=[make_datum(weights=[1.0, 1.0])]),
            "weights: its shape is [2], that of target_tokens [3]",
        ),
        (
            make_loss_body(data=[make_datum(weights=[1.0, float("nan"), 1.0])]),
            "weights has values that are not finite",
        ),
        (
            make_loss_body(loss_fn_config={"beta": 1.0}),
            "loss_fn_config.beta: cross_entropy has none",
        ),
        (
            make_loss_body("dro", loss_fn_config={"beta": float("inf")}),
            "loss_fn_config.beta is inf",
        ),
        (
            make_loss_body("dro", loss_fn_config_v2={"beta": pb.LossConfigValue(text="a")}),
            "loss_fn_config.beta: expected a number",
        ),
        (
            make_loss_body(
                data=[
                    make_datum(
                        weights=pb.Tensor(dense=b"12", dtype=pb.ARRAY_TYPE_BFLOAT16, shape=[1])
                    )
                ]
            ),
            "its dtype is 4; send float32 (1) or int64 (2)",
        ),
        (
            make_loss_body(data=[make_datum(weights=pb.Tensor(dense=b"12345", dtype=FLOAT32))]),
            "5 bytes are no whole number of float32 values",
        ),
        (
            make_loss_body(
                data=[make_datum(weights=pb.Tensor(dense=b"1234", dtype=FLOAT32, shape=[3]))]
            ),
            "1 values do not fit the shape [3]",
        ),
        (
            make_loss_body(data=[make_datum(weights=pb.Tensor(dtype=FLOAT32, shape=[-1]))]),
            "its shape is [-1]",
        ),
        *(
            (
                make_loss_body(data=[make_datum(weights=pb.Tensor(dtype=FLOAT32, shape=shape))]),
                message,
            )
            for shape, message in (
                ([0, 2**62], "its shape is [0, 4611686018427387904]"),
                ([1] * 65, "it has 65 dimensions; no loss takes more than 2"),
            )
        ),
        (
            make_loss_body(
                data=[
                    make_datum(
                        weights=pb.Tensor(
                            sparse_csr=pb.SparseRows(), dtype=FLOAT32, shape=[2**30, 2**30]
                        )
                    )
                ]
            ),
            "the arrays hold more than 33554432 values",
        ),
        *(
            (make_loss_body(data=[make_datum(target_tokens=tensor)]), "its sparse rows do not fit")
            for tensor in (
                _sparse_with(crow_indices=np.array([0, 1, 2, 5], INT64).tobytes()),
                _sparse_with(crow_indices=np.array([0, 3, 2, 4], INT64).tobytes()),
                _sparse_with(crow_indices=np.array([0, 4], INT64).tobytes()),
                _sparse_with(crow_indices=b""),
                _sparse_with(col_indices=np.array([0, 1, 0, 2], INT64).tobytes()),
                _sparse_with(col_indices=np.array([0, 1, 0], INT64).tobytes()),
                pb.Tensor(sparse_csr=SPARSE.sparse_csr, dtype=SPARSE.dtype, shape=[3]),
            )
        ),
    ],
)
def test_a_fault_is_refused_with_its_place(body: bytes, message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_forward_backward(body)


def test_a_result_has_each_datum_in_its_own_shape() -> None:
    flat, matrix = make_datum(), make_datum(target_tokens=[[6, 1], [7, 2], [8, 3]])
    batch = read_forward_backward(make_loss_body(data=[flat, flat, matrix]))
    logprobs = [np.arange(n, dtype=np.float32) for n in (3, 3, 6)]

    written = write_loss_result(LossResult(logprobs, {"loss:sum": 2.5}), batch)

    output = pb.ForwardBackwardOutput.FromString(written)
    assert (output.loss_fn_output_type, dict(output.metrics)) == ("scalar", {"loss:sum": 2.5})
    first, second = output.loss_fn_outputs
    assert (first.num_datums, second.num_datums) == (2, 1)
    flat_field, matrix_field = first.fields["logprobs"], second.fields["logprobs"]
    assert np.frombuffer(flat_field.offsets, "<i8").tolist() == [0, 12, 24]
    assert np.frombuffer(flat_field.data, "<f4").tolist() == [0, 1, 2, 0, 1, 2]
    assert (list(flat_field.trailing_shape), flat_field.dtype) == ([], pb.ARRAY_TYPE_FLOAT32)
    assert np.frombuffer(matrix_field.offsets, "<i8").tolist() == [0, 24]
    assert list(matrix_field.trailing_shape) == [2]
