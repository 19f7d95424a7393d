from typing import Any

import msgspec
import pytest

from flotilla_tinker.types import Kind
from tests.support.fake_desk import MODEL, MODEL_ID
from tests.tinker.api.conftest import ServedDesk
from tests.tinker.wire.examples import make_datum, make_loss_body

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
CREATE = {"session_id": "s1", "model_seq_id": 1, "base_model": MODEL, "type": "create_model"}
SAVED = f"tinker://{MODEL_ID}/weights/a"


async def test_a_new_model_is_order_0_of_its_session(served: ServedDesk) -> None:
    answer = await served.post("/create_model", **CREATE, lora_config={"rank": 8})

    assert answer.json() == {"request_id": "r0", "model_id": "s1:train:1"}
    (order,) = served.desk.orders
    assert (order.kind, order.tenant, order.session_id) == (Kind.CREATE_MODEL, "alice", "s1")
    assert (order.model_id, order.seq_id) == ("s1:train:1", 0)
    assert msgspec.json.decode(order.body)["lora_config"] == {"rank": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_model": "other"}, "there is no 'other' here; this server has 'tiny/model'"),
        ({"lora_config": {"rank": 17}}, "rank is 17; the rollout of this server has room for 16"),
        ({"optimizer_config": {"type": "dimuon"}}, "'dimuon' is not offered"),
    ],
)
async def test_a_model_that_cannot_be_made_is_refused_at_once(
    served: ServedDesk, fields: dict[str, Any], message: str
) -> None:
    answer = await served.post("/create_model", **{**CREATE, **fields})

    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    assert served.desk.orders == []


async def test_a_models_facts_are_told(served: ServedDesk) -> None:
    answer = await served.post("/get_info", model_id=MODEL_ID, type="get_info")

    info = answer.json()
    assert (info["type"], info["model_id"], info["model_name"]) == ("get_info", MODEL_ID, MODEL)
    assert info["model_data"] == {"model_name": MODEL, "tokenizer_id": MODEL}
    assert (info["is_lora"], info["lora_rank"]) == (True, 8)
    assert (await served.post("/get_info", model_id="s1:train:9")).status_code == 404


async def test_a_batch_is_ordered_as_it_came(served: ServedDesk) -> None:
    body = make_loss_body(seq_id=4)
    protobuf = {"Content-Type": "application/x-protobuf"}

    answer = await served.send("/forward_backward", body, **protobuf)
    await served.send("/forward_backward", make_loss_body(seq_id=5, forward_only=True))

    assert answer.json() == {"request_id": "r0", "model_id": MODEL_ID}
    first, second = served.desk.orders
    assert (first.kind, first.seq_id, first.body) == (Kind.FORWARD_BACKWARD, 4, body)
    assert (second.kind, second.seq_id) == (Kind.FORWARD, 5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (make_loss_body(seq_id=0), "seq_id: a model's orders are numbered from 1"),
        (make_loss_body("stable_reinforce"), "loss_fn=importance_sampling"),
        (make_loss_body("dro", [make_datum(logprobs=[0.0] * 3, advantages=[0.0] * 3)]), "'dro'"),
        (
            make_loss_body(data=[make_datum([1] * 65, target_tokens=[1] * 65)]),
            "data[0].model_input has 65 tokens; this server trains on up to 64",
        ),
        (make_loss_body(data=[make_datum([1, 2, 100])]), "data[0].model_input has the token 100"),
        (make_loss_body(data=[make_datum([1, -2, 3])]), "data[0].model_input has the token -2"),
        (
            make_loss_body(data=[make_datum(target_tokens=[1, 2, 2**40])]),
            "data[0].loss_fn_inputs.target_tokens has the token 1099511627776",
        ),
    ],
)
async def test_a_batch_that_cannot_be_trained_on_is_refused_at_once(
    served: ServedDesk, body: bytes, message: str
) -> None:
    answer = await served.send("/forward_backward", body)

    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    assert served.desk.orders == []


async def test_a_model_of_no_session_is_unknown(served: ServedDesk) -> None:
    answer = await served.send("/forward_backward", make_loss_body(model_id="m"))

    assert (answer.status_code, answer.json()) == (404, {"detail": "there is no model 'm'"})


async def test_updates_and_saves_are_orders_of_their_model(served: ServedDesk) -> None:
    place = {"model_id": MODEL_ID}
    await served.post("/optim_step", **place, seq_id=1, adam_params=ADAM, type="optim_step")
    await served.post("/save_weights", **place, seq_id=2, path="0001", overwrite=False)
    await served.post("/save_weights_for_sampler", **place, seq_id=3, sampling_session_seq_id=2)
    await served.post("/load_weights", **place, seq_id=4, path=SAVED, optimizer=True)
    await served.post("/unload_model", **place)

    assert [(order.kind, order.seq_id) for order in served.desk.orders] == [
        (Kind.OPTIM_STEP, 1),
        (Kind.SAVE_WEIGHTS, 2),
        (Kind.SAVE_WEIGHTS_FOR_SAMPLER, 3),
        (Kind.LOAD_WEIGHTS, 4),
        # After what its record names as the newest.
        (Kind.UNLOAD_MODEL, 10),
    ]
    assert {order.model_id for order in served.desk.orders} == {MODEL_ID}


async def test_a_model_is_created_from_a_saved_state(served: ServedDesk) -> None:
    place = {"session_id": "s1", "model_seq_id": 3}
    answer = await served.post("/load_weights", **place, path=SAVED, optimizer=False)

    assert answer.json()["model_id"] == "s1:train:3"
    (order,) = served.desk.orders
    assert (order.kind, order.model_id, order.seq_id) == (Kind.LOAD_WEIGHTS, "s1:train:3", 0)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"path": SAVED}, 400, "send model_id and seq_id, or for a new model"),
        ({"path": f"tinker://{MODEL_ID}/weights/z", "model_id": MODEL_ID}, 404, "no checkpoint"),
        ({"path": SAVED, "session_id": "s1", "model_seq_id": 1, "base_model": "x"}, 400, "no 'x'"),
    ],
)
async def test_a_load_that_cannot_be_made_is_refused_at_once(
    served: ServedDesk, fields: dict[str, Any], status: int, message: str
) -> None:
    answer = await served.post("/load_weights", optimizer=True, **fields)

    assert answer.status_code == status
    assert message in answer.json()["detail"]


async def test_an_order_that_is_sent_again_is_the_same_future(served: ServedDesk) -> None:
    place = {"model_id": MODEL_ID, "seq_id": 1}
    first = await served.post("/optim_step", **place, adam_params=ADAM)
    again = await served.post("/optim_step", **place, adam_params=ADAM)
    other = await served.post("/optim_step", **place, adam_params={**ADAM, "eps": 1e-8})

    assert first.json() == again.json()
    assert other.status_code == 422


async def test_no_order_waits_for_one_that_was_refused(served: ServedDesk) -> None:
    protobuf = {"Content-Type": "application/x-protobuf"}
    place = {"model_id": MODEL_ID, "seq_id": 8}
    body = make_loss_body("stable_reinforce", seq_id=7)
    answers = [
        await served.send("/forward_backward", body, **protobuf),
        await served.post("/optim_step", **place, adam_params={"eps": -1}),
        await served.post("/save_weights_external", **{**place, "seq_id": 9}),
        await served.post("/load_weights", path=f"tinker://{MODEL_ID}/weights/z", **place),
        await served.send("/forward_backward", b"\xff", **protobuf),
        await served.post("/optim_step", **{**place, "seq_id": "8"}, adam_params=ADAM),
    ]

    assert {answer.status_code for answer in answers} == {400, 404}
    numbers = [(MODEL_ID, seq_id) for seq_id in (7, 8, 9, 8)]
    assert served.desk.passed_over == [("alice", *each) for each in numbers]
