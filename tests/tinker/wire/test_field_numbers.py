"""The wire's fields, as SDK 0.38 has them in `tinker/proto/tinker_public_pb2.py`."""

import pytest

from flotilla.tinker.v1 import tinker_wire_pb2 as pb

# Types are those of the wire format: bytes, texts and messages are alike there.
FIELDS = {
    "ForwardBackwardRequest": "model_id=1 seq_id=2 data=3* loss_fn=4 loss_fn_config=5*"
    " forward_only=6 loss_fn_config_v2=7*",
    "LossConfigValue": "number=1 text=2",
    "Datum": "model_input=1* loss_fn_inputs=2* model_input_spans=3* loss_fn_input_spans=4*",
    "ProvenanceSpan": "prompt_tokens=1 sampled_tokens=2",
    "TokenRun": "sequence_id=1 offset=2 length=3",
    "Chunk": "encoded_text=1 image=2 dmel=3",
    "EncodedTextChunk": "tokens=1",
    "ImageChunk": "data=1 format=2",
    "AudioChunk": "dmel=1",
    "Tensor": "dense=1 sparse_csr=2 dtype=3 shape=4*",
    "SparseRows": "values=1 crow_indices=2 col_indices=3",
    "ForwardBackwardOutput": "loss_fn_output_type=1 loss_fn_outputs=2* metrics=3*",
    "ArrayRecord": "type_tag=1 fields=2* num_datums=3",
    "BatchedTensor": "data=1 offsets=2 dtype=3 trailing_shape=4*",
    "SampleResponse": "sequences=1* prompt_logprobs=2 topk_prompt_logprobs=3"
    " prompt_cache_hit_tokens=4",
    "SampledSequence": "stop_reason=1 tokens=2 logprobs=3 policy_spans=20001*",
    "PolicySpan": "policy=1 tokens=2",
    "TopTokens": "token_ids=1 logprobs=2 k=3 length=4",
}

# Serialized by the SDK's own classes.
RECORDED = (
    "0a016d10011a2c0a080a060a040500000012200a0d7461726765745f746f6b656e73120f0a0806000000"
    "000000001802220101220d63726f73735f656e74726f70793001"
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_message_has_the_sdks_fields(name: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[name].fields
    shown = [f"{field.name}={field.number}{'*' * field.is_repeated}" for field in fields]

    assert " ".join(shown) == FIELDS[name]


def test_there_are_no_other_messages() -> None:
    assert {*pb.DESCRIPTOR.message_types_by_name} == {*FIELDS}


def test_a_batch_has_the_bytes_of_the_sdks_own_classes() -> None:
    datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\5\0\0\0"))])
    tensor = pb.Tensor(dense=b"\6\0\0\0\0\0\0\0", dtype=pb.ARRAY_TYPE_INT64, shape=[1])
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    request = pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="cross_entropy", data=[datum], forward_only=True
    )

    assert request.SerializeToString(deterministic=True).hex() == RECORDED
