"""Quotas, lifetimes, keys and verifiers of the emulator, over HTTP."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla_environments.fleet_emulator import command
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import draw_scenario
from flotilla_environments.tasks import verifier_source
from tests.environments.fleet_emulator_process import (
    call_tool,
    created,
    emulating,
    execute,
    execution,
    rpc,
    solve,
)

SPEED = 60  # a heartbeat interval of 30 s takes half a second


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulating("--speed", str(SPEED), "--run-verifiers-for", "3") as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer anything"}
    with httpx.Client(base_url=url, timeout=20, headers=headers) as client:
        client.delete("/_emulator/counters")
        yield client
        client.delete("/_emulator/faults")
        client.delete("/v1/env/instances/batch", params={"profile_id": "self"})


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    """An emulator that requires a key, and whose verifiers query the runner."""
    options = ("--env", "booking", "--verifiers", "http")
    with (
        emulating(*options, FLOTILLA_ENV_TOKEN="secret") as url,
        httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}) as client,
    ):
        yield client


def waits_until(http: httpx.Client, instance_id: str, status: str) -> dict[str, Any]:
    deadline = time.monotonic() + 4
    while True:
        body = http.get(f"/v1/env/instances/{instance_id}").json()
        if body["status"] == status:
            return body
        assert time.monotonic() < deadline, body
        time.sleep(0.02)


def test_an_instance_ends_at_its_ttl_or_without_heartbeats(http: httpx.Client) -> None:
    by_ttl = created(http, ttl_seconds=45)["instance_id"]
    beaten = created(http, heartbeat_interval=30)["instance_id"]
    silent = created(http, heartbeat_interval=30)["instance_id"]
    for _ in range(5):
        time.sleep(0.2)
        answer = http.post(f"/v1/env/instances/{beaten}/heartbeat", json={}).json()
        assert 0 < answer["deadline_timestamp"] - time.time() <= 30 / SPEED
    assert waits_until(http, by_ttl, "stopped")["termination_reason"] == "ttl"
    assert waits_until(http, silent, "stopped")["termination_reason"] == "heartbeat"
    assert http.get(f"/v1/env/instances/{beaten}").json()["status"] == "running"
    gone = http.post(f"/v1/env/instances/{silent}/heartbeat", json={})
    assert (gone.status_code, gone.json()["detail"]) == (404, f"Instance '{silent}' is not running")
    counted = http.get("/_emulator/counters").json()
    assert counted["instances"]["stopped"].items() >= {"ttl": 1, "heartbeat": 1}.items()


def test_a_gone_instance_answers_as_the_proxy_before_it_does(http: httpx.Client) -> None:
    instance = created(http)
    root = instance["urls"]["root"]
    http.delete(f"/v1/env/instances/{instance['instance_id']}").raise_for_status()
    answers = [
        call_tool(http, root, "list_issues", {}),
        http.get(f"{root}api/v1/env/resources"),
        http.get(f"{http.base_url}/never/api/v1/env/health"),
    ]
    assert {answer.status_code for answer in answers} == {502}
    assert all("<h1>502 Bad Gateway</h1>" in answer.text for answer in answers)


def test_a_repeated_create_names_the_instance_also_while_it_is_pending(http: httpx.Client) -> None:
    http.post("/_emulator/faults", json={"create_delay": 0.5}).raise_for_status()
    body = {"env_key": "shop", "data_key": "train-000001"}
    headers = {"x-request-id": "one"}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/env/instances", json=body, headers=headers, timeout=0.2)
    again = http.post("/v1/env/instances", json=body, headers=headers)
    detail = again.json()["detail"]
    assert (again.status_code, detail["error"]) == (409, "duplicate_request_id")
    pending = http.get(f"/v1/env/instances/{detail['instance_id']}").json()
    assert (pending["status"], pending["health"]) == ("pending", False)
    waits_until(http, detail["instance_id"], "running")


def test_quotas_are_refused_in_fleets_words(http: httpx.Client) -> None:
    body = {"env_key": "shop", "data_key": "train-000001"}
    http.post("/_emulator/faults", json={"instance_limit": 1}).raise_for_status()
    created(http)
    refused = http.post("/v1/env/instances", json=body)
    detail = refused.json()["detail"]
    assert (refused.status_code, detail["error_type"]) == (403, "instance_limit_exceeded")
    assert "You have 1 running instances out of a maximum of 1." in detail["message"]
    http.post("/_emulator/faults", json={"in_flight_creates": 0}).raise_for_status()
    busy = http.post("/v1/env/instances", json=body)
    assert (busy.status_code, busy.json()["detail"]) == (
        429,
        "Too many in-flight instance creations for this team",
    )


def test_wrong_fields_are_named_as_fleet_names_them(http: httpx.Client) -> None:
    answer = http.post("/v1/env/instances", json={"heartbeat_interval": 5})
    assert answer.status_code == 422
    named = {tuple(problem["loc"]): problem["type"] for problem in answer.json()["detail"]}
    assert named == {
        ("body", "env_key"): "missing",
        ("body", "heartbeat_interval"): "greater_than_equal",
    }
    unknown = http.post("/_emulator/faults", json={"create_dely": 1})
    assert unknown.status_code == 422
    assert unknown.json()["detail"][0]["loc"] == ["body", "create_dely"]
    assert http.get("/v1/tasks/nothing").json() == {"detail": "Task 'nothing' not found"}


def test_a_verifier_gets_its_arguments_and_the_instance(http: httpx.Client) -> None:
    instance = created(http)
    code = (
        "from fleet import verifier\n"
        "@verifier(key='k')\n"
        "def verify(env, word, final_answer=None):\n"
        "    print(env.instance_id, env.env_key, env.data_key)\n"
        "    return {'word': word, 'answer': final_answer,"
        " 'issues': env.db('seed').table('issues').count()}\n"
    )
    answer = execute(http, instance["instance_id"], code, "w", final_answer="a")
    assert answer["result"] == {"word": "w", "answer": "a", "issues": 3}, answer
    assert answer["stdout"] == f"{instance['instance_id']} tracker train-000001\n"
    unknown = http.post(
        "/v1/verifiers/execute",
        json={"key": "k", "sha256": "never", "args_array": [{"env": instance["instance_id"]}]},
    )
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "Bundle not found: never")


FAILING = {
    "KeyError": "def verify(env):\n    raise KeyError('x')",
    "SystemExit": "def verify(env):\n    raise SystemExit(3)",
    "SyntaxError": "def verify(env:\n",
    "NameError": "def other(env):\n    return 1",
    "TypeError": "async def verify(env):\n    return 1",
    "MemoryError": "def verify(env):\n    return bytearray(2**40)",
    "TimeoutError": "def verify(env):\n    while True: pass",
    "ValueError": "def verify(env):\n    return 'x' * 2**24",
    "ChildProcessError": "import os\ndef verify(env):\n    os._exit(0)",
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_verifier_that_fails_has_no_result_and_the_next_one_runs(
    http: httpx.Client, kind: str
) -> None:
    instance_id = created(http)["instance_id"]
    answer = execute(http, instance_id, FAILING[kind])
    assert (answer["success"], answer["result"]) == (False, None)
    assert answer["error"]["type"] == kind, answer
    assert execute(http, instance_id, "def verify(env):\n    return 1")["result"] == 1


def test_a_verifier_that_stops_its_worker_is_ended(http: httpx.Client) -> None:
    instance_id = created(http)["instance_id"]
    code = "import os, signal\ndef verify(env):\n    os.kill(os.getppid(), signal.SIGKILL)"
    answer = execute(http, instance_id, code)
    assert (answer["success"], answer["error"]["type"]) == (False, "ConnectionResetError")
    assert execute(http, instance_id, "def verify(env):\n    return 1")["result"] == 1


def test_a_verifier_leaves_nothing_behind(http: httpx.Client) -> None:
    instance_id = created(http)["instance_id"]
    code = (
        "import builtins\n"
        "def verify(env):\n"
        "    seen = hasattr(builtins, 'mark')\n"
        "    builtins.mark = 1\n"
        "    env.db('current').exec('delete from issues')\n"
        "    return [seen, env.db('current').table('issues').count()]\n"
    )
    assert [execute(http, instance_id, code)["result"] for _ in range(2)] == [[False, 0]] * 2


def test_verifiers_over_http_give_the_same_grades(guarded: httpx.Client) -> None:
    instance = created(guarded, env_key="booking", data_key="train-000000")
    task = guarded.get("/v1/tasks/booking-train-000000").json()
    body = execution(instance["instance_id"], task["verifier_func"], final_answer="done")
    body["function_name"] = "validate_task"
    before = guarded.post("/v1/verifiers/execute", json=body).json()
    solve(instance["urls"]["root"], "booking", "train-000000", key="secret")
    after = guarded.post("/v1/verifiers/execute", json=body).json()
    assert (before["result"], after["result"]) == (0, 1)
    assert guarded.get("/_emulator/counters").json()["requests"]["query"] == 10


async def test_many_episodes_at_once_get_their_own_grades(url: str) -> None:
    solved = {
        index: plan_calls({"env_id": "booking", "data_id": f"train-{index:06d}"})
        for index in (0, 2)
    }
    headers = {"authorization": "Bearer x", "accept": "application/json, text/event-stream"}

    async def episode(client: httpx.AsyncClient, index: int) -> int:
        data_key = f"train-{index:06d}"
        body = {"env_key": "booking", "data_key": data_key, "ttl_seconds": 3_600}
        instance = (await client.post("/v1/env/instances", json=body)).json()
        for name, arguments in solved.get(index, ()):
            call = {"name": name, "arguments": arguments}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            await client.post(f"{instance['urls']['root']}mcp", json=message)
        code = verifier_source("booking", draw_scenario("booking", data_key).kind)
        request = execution(instance["instance_id"], code, final_answer="done")
        request["function_name"] = "validate_task"
        graded = (await client.post("/v1/verifiers/execute", json=request)).json()
        await client.delete(f"/v1/env/instances/{instance['instance_id']}")
        return graded["result"]

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        results = await asyncio.gather(*(episode(client, index) for index in range(12)))
        counted = (await client.get("/_emulator/counters")).json()
    assert results == [int(index in solved) for index in range(12)]
    assert counted["instances"]["live"] == []
    assert counted["most_in_flight"]["verifiers"] > 2


def test_a_key_is_required_and_the_runner_requires_its_token(guarded: httpx.Client) -> None:
    for path in ("/v1/env/", "/v1/account", "/_emulator/counters", "/x/mcp"):
        wrong = guarded.get(path, headers={"authorization": "Bearer guess"})
        assert wrong.status_code == 401
        assert guarded.get(path, headers={"authorization": ""}).status_code == 401
    assert guarded.get("/health", headers={"authorization": ""}).status_code == 200
    assert [entry["env_key"] for entry in guarded.get("/v1/env/").json()] == ["booking"]
    api = created(guarded, env_key="booking")["urls"]["manager"]["api"]
    assert guarded.get(f"{api}/health").json() == {"detail": "Not Found"}
    token = guarded.get("/v1/runner-auth/token").json()["token"]
    opened = guarded.get(f"{api}/health", headers={"x-runner-token": token})
    assert opened.json()["status"] == "healthy"


def test_mcp_sessions_are_kept_and_answered_in_event_streams() -> None:
    with (
        emulating("--mcp-sessions") as url,
        httpx.Client(base_url=url, headers={"authorization": "Bearer x"}) as http,
    ):
        root = created(http, env_key="booking", data_key="train-000000")["urls"]["root"]
        bare = call_tool(http, root, "find_bookings", {})
        assert (bare.status_code, "session" in bare.text.lower()) == (400, True)
        hello: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {}}
        hello["clientInfo"] = {"name": "test", "version": "1"}
        opened = rpc(http, f"{root}mcp", "initialize", hello)
        assert opened.headers["content-type"].startswith("text/event-stream")
        assert opened.headers["mcp-session-id"]


def test_computer_is_a_tool_of_the_aggregator_only(http: httpx.Client) -> None:
    root = created(http)["urls"]["root"]
    names: dict[str, set[str]] = {}
    for endpoint in ("mcp", "api/v1/mcp"):
        tools = rpc(http, f"{root}{endpoint}", "tools/list").json()["result"]["tools"]
        names[endpoint] = {tool["name"] for tool in tools}
    assert names["api/v1/mcp"] - names["mcp"] == {"computer"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tasks", "nowhere.json"], 1, "No such file or directory: 'nowhere.json'"),
        (["--speed", "0"], 2, "--speed must be more than 0"),
        (["--env", "bank"], 2, "invalid choice: 'bank'"),
        (["--port", "99999"], 1, "cannot listen on 127.0.0.1:99999"),
    ],
)
def test_a_wrong_option_is_refused_precisely(
    options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = command.main(options)
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert message in capsys.readouterr().err


def test_flotilla_starts_the_emulator_and_teaches_its_two_variables() -> None:
    flotilla = [sys.executable, "-m", "flotilla_launcher.cli.app", "emulator", "--help"]
    shown = subprocess.run(flotilla, capture_output=True, text=True, timeout=20)
    assert shown.returncode == 0
    assert "export FLEET_BASE_URL=http://127.0.0.1:8900 FLEET_API_KEY=anything" in shown.stdout


def test_what_is_not_installed_is_named_with_the_extra_that_has_it() -> None:
    program = (
        "import importlib.util, runpy\n"
        "importlib.util.find_spec = lambda name, find=importlib.util.find_spec: "
        "None if name == 'fleet' else find(name)\n"
        "runpy.run_module('flotilla_environments.fleet_emulator', run_name='__main__')\n"
    )
    refused = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert refused.returncode == 1
    assert "not installed: fleet; the emulator needs the extra `emulator`" in refused.stderr


def test_a_task_file_decides_which_tasks_and_versions_are_served(tmp_path: Path) -> None:
    task = {"task_key": "t", "prompt": "p", "env_key": "fleet_booking", "env_version": "v0.0.74"}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps({"tasks": [task | {"data_key": "kinesis"}]}))
    with (
        emulating("--tasks", str(file)) as url,
        httpx.Client(base_url=url, headers={"authorization": "Bearer x"}) as http,
    ):
        tasks = http.get("/v1/tasks").json()["tasks"]
        assert [(entry["key"], entry["data_id"]) for entry in tasks] == [("t", "kinesis")]
        assert list(http.get("/v1/env/fleet_booking").json()["versions"]) == ["v1", "v0.0.74"]
        wanted = {"env_key": "fleet_booking", "data_key": "kinesis", "env_version": "v0.0.74"}
        assert created(http, **wanted)["version"] == "v0.0.74"
        without = http.post("/v1/env/instances", json={"env_key": "fleet_booking"})
        assert "data_key: 'fleet_booking' has no default data" in without.json()["detail"]
