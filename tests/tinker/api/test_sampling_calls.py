from typing import Any

import pytest

from flotilla_tinker.types import Kind
from tests.support.fake_desk import MODEL, MODEL_ID, SAMPLER_ID
from tests.tinker.api.conftest import ServedDesk
from tests.tinker.wire.examples import make_sample_body

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_sampler_is_opened_for_the_base_or_a_checkpoint(served: ServedDesk) -> None:
    place = {"session_id": "s1", "type": "create_sampling_session"}
    path = f"tinker://{MODEL_ID}/sampler_weights/b"
    base = await served.post(
        "/create_sampling_session", **place, sampling_session_seq_id=0, base_model=MODEL
    )
    await served.post(
        "/create_sampling_session", **place, sampling_session_seq_id=1, model_path=path
    )

    assert base.json() == {
        "type": "create_sampling_session",
        "sampling_session_id": "s1:sample:0",
    }
    assert served.desk.opened == [("s1", 0, MODEL, None), ("s1", 1, None, path)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "send a base_model or a model_path"),
        ({"base_model": "other"}, "there is no 'other' here"),
        ({"model_path": "/tmp/x"}, "is no path of a checkpoint"),
    ],
)
async def test_a_sampler_of_anything_else_is_refused(
    served: ServedDesk, fields: dict[str, Any], message: str
) -> None:
    answer = await served.post(
        "/create_sampling_session", session_id="s1", sampling_session_seq_id=0, **fields
    )

    assert answer.status_code == 400
    assert message in answer.json()["detail"]


async def test_a_sampler_is_described(served: ServedDesk) -> None:
    found = await served.get(f"/samplers/{SAMPLER_ID}")

    assert found.json() == {"sampler_id": SAMPLER_ID, "base_model": MODEL, "model_path": None}
    assert (await served.get("/samplers/s1:sample:7")).status_code == 404


async def test_a_sample_has_an_id_for_each_answer(served: ServedDesk) -> None:
    body = make_sample_body(num_samples=2, seq_id=3)
    answer = await served.send("/asample", body)

    ids = ["s1:sample:0:3:0", "s1:sample:0:3:1"]
    assert answer.json() == {"request_id": "r0", "sample_sequence_ids": ids}
    (order,) = served.desk.orders
    assert (order.kind, order.session_id, order.model_id) == (Kind.SAMPLE, "s1", None)
    assert (order.seq_id, order.body) == (3, body)
    assert order.facts == {"sampler_id": SAMPLER_ID, "sample_sequence_ids": ids}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"record_stability_info": True}, "loss_fn=importance_sampling"),
        ({"sampling_params": {"max_tokens": 46}}, "exceed this server's window of 48 tokens"),
        ({"prompt": {"chunks": [{"tokens": [1] * 48}]}}, "the prompt has 48 tokens"),
        ({"prompt": {"chunks": [{"tokens": [1, 100]}]}}, "prompt has the token 100"),
        ({"sampling_params": {"stop": [100]}}, "stop has the token 100"),
    ],
)
async def test_a_sample_that_cannot_be_drawn_is_refused_at_once(
    served: ServedDesk, fields: dict[str, Any], message: str
) -> None:
    answer = await served.send("/asample", make_sample_body(**fields))

    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    assert served.desk.orders == []


async def test_a_prompt_may_leave_room_for_one_token(served: ServedDesk) -> None:
    full = {"prompt": {"chunks": [{"tokens": [1] * 47}]}, "sampling_params": {"max_tokens": 1}}

    assert (await served.send("/asample", make_sample_body(**full))).status_code == 200
