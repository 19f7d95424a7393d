import numpy as np
import pytest

from flotilla_tinker.types import Category, Failure, Kind, Result, SampledAnswer, SampleResult
from flotilla_tinker.wire.json_bodies import write_json
from flotilla_tinker.wire.samples import POLICY_HEADER, read_sample, write_sample_result
from tests.tinker.api.conftest import ServedDesk
from tests.tinker.wire.examples import make_sample_body

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROTOBUF = "application/x-protobuf"


def _make_result() -> Result:
    tokens = np.zeros(3, np.int32)
    answer = SampledAnswer(tokens, tokens.astype(np.float32), True, [("m@1", 2), ("m@2", 1)])
    return write_sample_result(SampleResult([answer]), read_sample(make_sample_body())[1])


async def test_an_order_at_work_is_asked_for_again(served: ServedDesk) -> None:
    await served.send("/asample", make_sample_body())
    answer = await served.post("/retrieve_future", request_id="r0", allow_metadata_only=True)

    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": "r0", "queue_state": "active"}


async def test_a_failure_is_told_with_whose_fault_it_is(served: ServedDesk) -> None:
    served.desk.results["r0"] = Failure("the loss is not finite", Category.USER)
    answer = await served.post("/retrieve_future", request_id="r0")

    assert answer.status_code == 200
    assert answer.json() == {"error": "the loss is not finite", "category": "user"}


async def test_a_result_in_json_is_delivered(served: ServedDesk) -> None:
    served.desk.results["r0"] = write_json(Kind.OPTIM_STEP, metrics={"grad_norm": 1.5})
    answer = await served.post("/retrieve_future", request_id="r0")

    assert answer.json() == {"type": "optim_step", "metrics": {"grad_norm": 1.5}}


async def test_a_sample_is_delivered_with_the_weights_of_its_tokens(served: ServedDesk) -> None:
    result = served.desk.results["r0"] = _make_result()
    answer = await served.send("/retrieve_future", b'{"request_id": "r0"}', Accept=PROTOBUF)

    assert answer.headers["content-type"] == PROTOBUF
    assert answer.content == result.body
    assert answer.headers[POLICY_HEADER] == "m@1=2,m@2=1"
    spans = (await served.get("/flotilla/policy_spans/r0")).json()
    assert spans == {
        "request_id": "r0",
        "sequences": [[{"policy": "m@1", "tokens": 2}, {"policy": "m@2", "tokens": 1}]],
    }


async def test_a_client_that_reads_no_arrays_is_told(served: ServedDesk) -> None:
    served.desk.results["r0"] = _make_result()
    answer = await served.send(
        "/retrieve_future", b'{"request_id": "r0"}', Accept="application/json"
    )

    assert answer.status_code == 406
    assert f"send Accept: {PROTOBUF}" in answer.json()["detail"]


async def test_a_large_result_is_announced_if_the_client_can_wait(served: ServedDesk) -> None:
    large = served.desk.results["r0"] = Result(b"x" * 300_000, PROTOBUF)
    first = await served.post("/retrieve_future", request_id="r0", allow_metadata_only=True)
    second = await served.post("/retrieve_future", request_id="r0", allow_metadata_only=False)

    assert first.json() == {"status": "complete_metadata", "response_payload_size": 300_000}
    assert second.content == large.body


async def test_only_a_finished_sample_has_spans(served: ServedDesk) -> None:
    await served.send("/asample", make_sample_body())

    assert (await served.get("/flotilla/policy_spans/r0")).status_code == 400
    assert (await served.get("/flotilla/policy_spans/r9")).status_code == 404


async def test_a_sample_is_cancelled(served: ServedDesk) -> None:
    answer = await served.post("/cancel_future", request_id="r0")

    assert answer.status_code == 200
    assert served.desk.cancelled == ["r0"]
