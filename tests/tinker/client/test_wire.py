"""The protocol below Tinker's client: what its SDK sends only when something goes wrong."""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.tinker.client.served import Served, client_tests
from tests.tinker.client.stage import MODEL

pytestmark = client_tests

_DEADLINE_S = 300.0


class RawClient:
    """Requests without the SDK's repetitions."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.session = str(self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"])

    def send(self, name: str, **body: Any) -> httpx.Response:
        return self._http.post(f"/api/v1/{name}", json=body)

    def post(self, name: str, **body: Any) -> dict[str, Any]:
        response = self.send(name, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, request_id: str) -> httpx.Response:
        """Return the answer of a future that is done."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            response = self.send("retrieve_future", request_id=request_id)
            waiting = response.status_code == 408
            if not waiting and b'"try_again"' not in response.content[:200]:
                return response
        raise AssertionError(f"{request_id} is not done within {_DEADLINE_S:g} s")

    def new_model(self, number: int = 0, **lora: Any) -> str:
        sent = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=MODEL,
            lora_config={"rank": 8} | lora,
        )
        return str(self.result(sent["request_id"]).json()["model_id"])

    def new_sampler(self, number: int = 0) -> str:
        sent = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=number,
            base_model=MODEL,
        )
        return str(sent["sampling_session_id"])

    def sample_body(self, sampler: str, seq_id: int, **body: Any) -> dict[str, Any]:
        chunk = {"type": "encoded_text", "tokens": list(range(40, 50))}
        default = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [chunk]},
            "sampling_params": {"max_tokens": 4},
        }
        return default | body

    def optim_body(self, model: str, seq_id: int, learning_rate: float = 1e-3) -> dict[str, Any]:
        settings = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        return {"model_id": model, "seq_id": seq_id, "adam_params": settings}


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers={"X-API-Key": served.key}, timeout=60) as one:
        yield one


@pytest.fixture
def raw(http: httpx.Client) -> Iterator[RawClient]:
    one = RawClient(http)
    yield one
    # Its models make room.
    one.send(f"sessions/{one.session}/finish", reason={"type": "success"})


def test_a_repeated_request_is_the_first_one(raw: RawClient) -> None:
    body = raw.optim_body(raw.new_model(), seq_id=1)
    first, again = raw.post("optim_step", **body), raw.post("optim_step", **body)
    assert again["request_id"] == first["request_id"]
    assert raw.result(first["request_id"]).json() == raw.result(again["request_id"]).json()


def test_a_repeated_sample_keeps_its_sequences(raw: RawClient) -> None:
    body = raw.sample_body(raw.new_sampler(), seq_id=0, num_samples=2)
    first, again = raw.post("asample", **body), raw.post("asample", **body)
    assert len(first["sample_sequence_ids"]) == 2
    for key in ("request_id", "sample_sequence_ids"):
        assert again[key] == first[key]


def test_a_number_stands_for_one_request(raw: RawClient) -> None:
    model = raw.new_model()
    raw.post("optim_step", **raw.optim_body(model, seq_id=1))
    refused = raw.send("optim_step", **raw.optim_body(model, seq_id=1, learning_rate=1.0))
    assert 400 <= refused.status_code < 500
    assert "another body" in refused.text


def test_requests_wait_for_the_ones_before_them(raw: RawClient) -> None:
    model = raw.new_model()
    second = raw.post("optim_step", **raw.optim_body(model, seq_id=2))["request_id"]
    early = raw.send("retrieve_future", request_id=second)
    assert early.status_code == 408 or early.json()["type"] == "try_again"
    first = raw.post("optim_step", **raw.optim_body(model, seq_id=1))["request_id"]
    assert "metrics" in raw.result(first).json()
    assert "metrics" in raw.result(second).json()


def test_a_result_may_be_read_again(raw: RawClient) -> None:
    sent = raw.post("asample", **raw.sample_body(raw.new_sampler(), seq_id=0))["request_id"]
    assert raw.result(sent).content == raw.result(sent).content


def test_an_unknown_future_is_gone(raw: RawClient) -> None:
    assert raw.send("retrieve_future", request_id="never").status_code in (404, 410)


def test_the_policy_of_every_sampled_token_is_told(raw: RawClient) -> None:
    sent = raw.post("asample", **raw.sample_body(raw.new_sampler(), seq_id=0))["request_id"]
    answer = raw.result(sent)
    assert [name for name in answer.headers if "polic" in name.lower()]


@pytest.mark.parametrize("key", [None, "", "tml-other", "nonsense"])
def test_a_wrong_key_is_refused(served: Served, key: str | None) -> None:
    headers = {} if key is None else {"X-API-Key": key}
    with httpx.Client(base_url=served.url, headers=headers) as http:
        assert http.post("/api/v1/create_session", json={}).status_code == 401
        assert http.get("/api/v1/get_server_capabilities").status_code == 401


def test_a_finished_session_is_over(raw: RawClient) -> None:
    model = raw.new_model()
    raw.post(f"sessions/{raw.session}/finish", reason={"type": "success"}, detail=None)
    refused = raw.send("optim_step", **raw.optim_body(model, seq_id=1))
    assert 400 <= refused.status_code < 500


def test_an_unloaded_model_trains_no_more_and_the_rest_does(raw: RawClient) -> None:
    gone, kept = raw.new_model(0), raw.new_model(1)
    raw.result(raw.post("unload_model", model_id=gone)["request_id"])
    refused = raw.send("optim_step", **raw.optim_body(gone, seq_id=1))
    if refused.status_code == 200:
        assert "error" in raw.result(refused.json()["request_id"]).json()
    sent = raw.post("optim_step", **raw.optim_body(kept, seq_id=1))["request_id"]
    assert "metrics" in raw.result(sent).json()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"record_stability_info": True}, "loss_fn=importance_sampling"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 100_000}, "num_samples"),
        ({"sampling_params": {"max_tokens": 4, "temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": 100_000}}, "max_tokens|2048"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [9] * 5000}]}}, "2048"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, "vocabulary"),
        ({"prompt": {"chunks": []}}, "prompt|token"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
        ({"seq_id": None}, "seq_id"),
        ({"sampling_session_id": "never"}, "never"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_by_name(
    raw: RawClient, changed: dict[str, Any], named: str
) -> None:
    refused = raw.send("asample", **(raw.sample_body(raw.new_sampler(), 0) | changed))
    told = refused
    if refused.status_code == 200:
        told = raw.result(refused.json()["request_id"])
        assert told.json()["category"] == "user"
    else:
        assert 400 <= refused.status_code < 500
    assert re.search(named, told.text)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"base_model": "nobody/nothing"}, MODEL),
        ({"lora_config": {"rank": 100_000}}, "rank"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "adam"),
        ({"session_id": "never"}, "never"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(
    raw: RawClient, changed: dict[str, Any], named: str
) -> None:
    body = {"session_id": raw.session, "model_seq_id": 0, "base_model": MODEL}
    refused = raw.send("create_model", **(body | {"lora_config": {"rank": 8}} | changed))
    told = refused
    if refused.status_code == 200:
        told = raw.result(refused.json()["request_id"])
    else:
        assert 400 <= refused.status_code < 500
    assert named in told.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a": NaN}', b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", ["create_session", "create_model", "asample", "optim_step"])
def test_nonsense_is_the_clients_fault(http: httpx.Client, name: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = http.post(f"/api/v1/{name}", content=body, headers=headers)
    assert response.status_code < 500
