"""Planted faults, and their counts."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from flotilla_environments.fleet_emulator.faults import FaultPlan, Faults
from flotilla_environments.fleet_emulator.operation_names import (
    classify_request,
    instance_of,
    mcp_endpoint,
)
from flotilla_environments.reference_policies import plan_calls
from tests.environments.fleet_emulator_process import (
    call_tool,
    created,
    emulating,
    execute,
    execution,
)

BOOKING = {"env_id": "booking", "data_id": "train-000000"}
KEY = {"authorization": "Bearer anything"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulating() as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20, headers=KEY) as client:
        client.delete("/_emulator/counters")
        yield client
        client.delete("/_emulator/faults")
        client.delete("/v1/env/instances/batch", params={"profile_id": "self"})


def inject(http: httpx.Client, **faults: Any) -> None:
    response = http.post("/_emulator/faults", json=faults)
    assert response.status_code == 200, response.text


def counters(http: httpx.Client) -> Any:
    return http.get("/_emulator/counters").json()


def booking(http: httpx.Client) -> dict[str, Any]:
    return created(http, env_key="booking", data_key="train-000000")


def struck(on: FaultPlan, name: Any, times: int, endpoint: str | None = None) -> list[int | None]:
    replies = [on.next_reply(name, endpoint)[1] for _ in range(times)]
    return [reply.status if reply else None for reply in replies]


def test_replies_come_in_turn_and_then_at_their_rate() -> None:
    replies = [{"status": 429}, None, {"status": 500}]
    faults = {"faults": [{"on": ["create"], "replies": replies, "rate": 0.5}], "seed": 3}
    plans = [FaultPlan(), FaultPlan()]
    for each in plans:
        each.set_faults(Faults.model_validate(faults))
    first, second = (struck(each, "create", 40) for each in plans)
    assert first == second
    assert first[:3] == [429, None, 500]
    assert {*first[3:]} == {502, None}
    assert struck(plans[0], "delete_instance", 3) == [None] * 3
    assert plans[0].count_remaining() == {"replies": [0], "verifiers": 0}


def test_requests_beyond_a_rate_are_refused() -> None:
    now = 0.0
    each = FaultPlan(clock=lambda: now)
    fault = {"on": ["create"], "per_second": 2, "reply": {"status": 429}}
    each.set_faults(Faults.model_validate({"faults": [fault]}))
    assert struck(each, "create", 4) == [None, None, 429, 429]
    now = 0.9
    assert struck(each, "create", 1) == [429]
    now = 1.0
    assert struck(each, "create", 3) == [None, None, 429]


def test_a_fault_hits_what_it_names() -> None:
    each = FaultPlan()
    faults = [{"on": ["mcp"], "endpoint": "mcp", "rate": 1}, {"on": ["any"], "delay": 0.5}]
    each.set_faults(Faults.model_validate({"faults": faults}))
    assert struck(each, "call_tool", 1, "mcp") == [502]
    assert struck(each, "call_tool", 1, "api/v1/mcp") == [None]
    assert struck(each, "reset", 1) == [None]
    assert each.next_reply("reset", None)[0] == 0.5


@pytest.mark.parametrize(
    "wrong",
    [{"on": ["creat"]}, {"on": []}, {"on": ["create"], "rate": 2}, {"on": ["create"], "status": 1}],
)
def test_a_fault_with_a_wrong_field_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Faults.model_validate({"faults": [wrong]})


@pytest.mark.parametrize(
    ("method", "path", "body", "name"),
    [
        ("POST", "/v1/env/instances", b"", "create"),
        ("DELETE", "/v1/env/instances/batch", b"", "delete_batch"),
        ("DELETE", "/v1/env/instances/i1", b"", "delete_instance"),
        ("GET", "/v1/env/booking", b"", "environments"),
        ("POST", "/i1/mcp", b'{"method": "tools/call"}', "call_tool"),
        ("POST", "/i1/api/v1/mcp", b'{"method": "tools/list"}', "list_tools"),
        ("POST", "/browsers/b1/mcp", b"[]", "mcp_other"),
        ("DELETE", "/i1/mcp", b"", "mcp_other"),
        ("POST", "/i1/api/v1/env/resources/sqlite/seed/query", b"", "query"),
        ("GET", "/favicon.ico", b"", "other"),
    ],
)
def test_requests_are_distinguished(method: str, path: str, body: bytes, name: str) -> None:
    assert classify_request(method, path, body) == name


def test_addresses_name_their_instance() -> None:
    paths = ["/i1/mcp", "/i1/api/v1/mcp", "/i1/api/v1/env/reset", "/v1/env/instances/i1/heartbeat"]
    assert [instance_of(path) for path in paths] == ["i1"] * 4
    assert instance_of("/v1/regions") is None
    assert [mcp_endpoint(path) for path in paths[:3]] == ["mcp", "api/v1/mcp", None]


def test_creates_fail_as_requested_and_leave_nothing(http: httpx.Client) -> None:
    before = counters(http)["instances"]["created"]
    detail = {"detail": {"error": "seed_placement_failed", "message": "x", "retryable": True}}
    replies = [{"status": 429, "body": detail, "retry_after": 1.5}, {"status": 503}]
    inject(http, faults=[{"on": ["create"], "replies": replies}])
    body = {"env_key": "shop", "data_key": "train-000001"}
    limited, broken = (http.post("/v1/env/instances", json=body) for _ in range(2))
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "1.5")
    assert limited.json() == detail
    assert (broken.status_code, broken.headers["content-type"][:9]) == (503, "text/html")
    created(http)
    counted = counters(http)
    assert counted["instances"]["created"] == before + 1
    assert counted["answers"] == {"create 200": 1, "create 429": 1, "create 503": 1}
    assert counted["injected"] == {"create 429": 1, "create 503": 1}


def test_an_applied_call_has_run_once_though_its_answer_is_lost(http: httpx.Client) -> None:
    root = booking(http)["urls"]["root"]
    lost = {"status": 502, "applied": True}
    inject(http, faults=[{"on": ["call_tool"], "replies": [None, lost]}])
    (_, looked_up), (cancel, arguments) = plan_calls(BOOKING)
    assert call_tool(http, root, "find_bookings", looked_up).status_code == 200
    assert call_tool(http, root, cancel, arguments).status_code == 502
    assert counters(http)["tools"] == {"find_bookings": 1, "cancel_booking": 1}
    again = call_tool(http, root, cancel, arguments).json()["result"]
    assert again["isError"] is True


def test_a_hanging_reset_is_left_by_its_client_and_not_made(http: httpx.Client) -> None:
    runner = booking(http)["urls"]["manager"]["api"]
    current = f"{runner}/resources/sqlite/current/query"
    http.post(current, json={"query": "delete from bookings", "read_only": False})
    inject(http, faults=[{"on": ["reset"], "replies": [{"hang": 60}]}])
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{runner}/reset", json={}, timeout=0.2)
    rows = http.post(current, json={"query": "select count(*) from bookings"}).json()["rows"]
    assert rows == [[0]]
    assert http.post(f"{runner}/reset", json={}).json()["success"] is True


def test_a_new_instance_warms_up_and_an_endpoint_may_be_missing(http: httpx.Client) -> None:
    missing = {"on": ["mcp"], "endpoint": "mcp", "rate": 1, "reply": {"status": 404, "body": ""}}
    inject(http, mcp_warmup=0.4, faults=[missing])
    root = booking(http)["urls"]["root"]
    arguments = plan_calls(BOOKING)[0][1]
    cold = call_tool(http, root, "find_bookings", arguments, "api/v1/mcp")
    assert (cold.status_code, "503 Service Unavailable" in cold.text) == (503, True)
    time.sleep(0.5)
    assert call_tool(http, root, "find_bookings", arguments, "mcp").status_code == 404
    warm = call_tool(http, root, "find_bookings", arguments, "api/v1/mcp")
    assert warm.json()["result"]["isError"] is False


async def test_only_so_many_tool_calls_are_served_at_once(http: httpx.Client, url: str) -> None:
    root = booking(http)["urls"]["root"]
    inject(http, mcp_limit=3, mcp_retry_after=0.5, faults=[{"on": ["call_tool"], "delay": 0.3}])
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    message |= {"params": {"name": "find_bookings", "arguments": plan_calls(BOOKING)[0][1]}}
    accept = {"accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(headers=KEY | accept) as client:
        calls = (client.post(f"{root}mcp", json=message) for _ in range(8))
        answers = await asyncio.gather(*calls)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * 3 + [429] * 5
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert (refused.headers["retry-after"], refused.json()["detail"]) == (
        "0.5",
        "Rate limit exceeded",
    )
    counted = counters(http)
    assert (counted["tools"], counted["in_flight"]["mcp"]) == ({"find_bookings": 3}, 0)
    assert counted["most_in_flight"]["mcp"] == 8


def test_verifier_executions_end_as_requested(http: httpx.Client) -> None:
    instance_id = booking(http)["instance_id"]
    code = "def verify(env):\n    return 1"
    kinds = [{"kind": "failed", "message": "boom"}, {"kind": "judge_error"}, {"kind": "no_result"}]
    inject(http, verifiers=[*kinds, None], faults=[{"on": ["execute_verifier"], "replies": [{}]}])
    lost = http.post("/v1/verifiers/execute", json=execution(instance_id, code))
    assert lost.status_code == 502
    failed, judged, nothing, honest = (execute(http, instance_id, code) for _ in range(4))
    assert (failed["success"], failed["error"]["message"]) == (False, "boom")
    assert (judged["success"], judged["result"], judged["stdout"][:12]) == (True, 0, "JUDGE ERROR:")
    assert (nothing["success"], nothing["result"]) == (True, None)
    assert (honest["success"], honest["result"]) == (True, 1)


def test_an_instance_is_killed_by_a_request_or_by_hand(http: httpx.Client) -> None:
    first, second = booking(http), booking(http)
    inject(http, faults=[{"on": ["call_tool"], "replies": [{"kill": True}]}])
    arguments = plan_calls(BOOKING)[0][1]
    root = first["urls"]["root"]
    assert call_tool(http, root, "find_bookings", arguments).status_code == 502
    http.post("/_emulator/kill", json={"instance_id": second["instance_id"]}).raise_for_status()
    for instance in (first, second):
        body = http.get(f"/v1/env/instances/{instance['instance_id']}").json()
        assert (body["status"], body["termination_reason"]) == ("stopped", "killed")
    unknown = http.post("/_emulator/kill", json={"instance_id": "never"})
    assert unknown.json() == {"detail": "Instance 'never' not found"}


def test_a_gated_runner_answers_404_without_its_token(http: httpx.Client) -> None:
    runner = booking(http)["urls"]["manager"]["api"]
    assert http.get("/v1/runner-auth/token").status_code == 404
    inject(http, runner_token="gate")
    assert http.get("/v1/runner-auth/token").json() == {"token": "gate"}
    assert http.get(f"{runner}/resources").json() == {"detail": "Not Found"}
    opened = http.get(f"{runner}/resources", headers={"x-runner-token": "gate"})
    assert len(opened.json()) == 2
