import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import MCPError
from mcp.client import Client
from mcp.types import ImageContent, TextContent

from flotilla_environments.api import Picture, open_instance
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import draw_scenario
from tests.support.environment_processes import environment_command
from tests.support.started_process import started
from tests.support.waiting import wait_until

CALL = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


@contextmanager
def serving(*options: str, **variables: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    command = environment_command("-m", "flotilla_environments.serve", *options)
    environ = os.environ | variables
    with started(command, stderr=subprocess.PIPE, env=environ) as (process, line):
        yield process, json.loads(line)["url"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--max-instances", "40") as (_, address):
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
        client.delete("/v1/env/instances/batch", params={"run_id": "test"})


def create(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    body = {"env_key": "tracker", "data_key": "train-000001", "run_id": "test"} | changes
    response = http.post("/v1/env/instances", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def delete(http: httpx.Client, instance_id: str) -> None:
    http.delete(f"/v1/env/instances/{instance_id}").raise_for_status()


def query(http: httpx.Client, root: str, name: str, **body: Any) -> dict[str, Any]:
    response = http.post(f"{root}api/v1/env/resources/sqlite/{name}/query", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_mcp_client_solves_a_task(http: httpx.Client, mode: Any) -> None:
    instance = create(http)
    root = instance["urls"]["root"]
    async with Client(f"{root}mcp", mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["find_issues", "close_issue", "assign_issue"]
        hints = tools["find_issues"].annotations
        assert hints is not None
        assert hints.read_only_hint
        assert tools["close_issue"].input_schema["required"] == ["issue_id"]
        local = open_instance("tracker", "train-000001")
        for name, arguments in plan_calls(local.scenario):
            result = await client.call_tool(name, arguments)
            text = result.content[0]
            assert isinstance(text, TextContent)
            assert text.text == json.dumps(local.call(name, arguments))
            assert not result.is_error
    rows = query(http, root, "current", query="select * from issues order by id")["rows"]
    expected = local.query("current", "select * from issues order by id").rows
    assert [tuple(row) for row in rows] == expected


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("close_issue", {"issue_id": 5}, "not found"),
        ("close_issue", {"issue_id": "5"}, "issue_id must be an integer"),
        ("fly", {}, "unknown tool: fly"),
    ],
)
async def test_a_refused_call_is_an_mcp_tool_error(
    http: httpx.Client, name: str, arguments: dict[str, Any], message: str
) -> None:
    async with Client(f"{create(http)['urls']['root']}mcp") as client:
        result = await client.call_tool(name, arguments)
    assert result.is_error
    assert result.content == [TextContent(type="text", text=message)]


async def test_an_mcp_client_is_shown_the_screen(http: httpx.Client) -> None:
    instance = create(http, env_key="screen")
    local = open_instance("screen", "train-000001")
    async with Client(f"{instance['urls']['root']}mcp") as client:
        look = ("computer", {"action": "screenshot"})
        for name, arguments in (look, *plan_calls(local.scenario)):
            result = await client.call_tool(name, arguments)
            [shown] = result.content
            assert isinstance(shown, ImageContent)
            assert shown.mime_type == "image/png"
            assert Picture(base64.b64decode(shown.data)) == local.call(name, arguments)


async def test_a_closed_instance_answers_no_tool_call(http: httpx.Client) -> None:
    instance = create(http)
    delete(http, instance["instance_id"])
    with pytest.raises((MCPError, ExceptionGroup)):
        async with Client(f"{instance['urls']['root']}mcp", mode="legacy"):
            pytest.fail("connected to an instance that is gone")


async def test_thirty_instances_keep_their_states_apart(url: str, http: httpx.Client) -> None:
    def post(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        params = {"name": name, "arguments": arguments}
        return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

    async def episode(client: httpx.AsyncClient, index: int) -> bool:
        data_key = f"train-{index:06d}"
        body = {"env_key": "shop", "data_key": data_key, "run_id": "test"}
        created = (await client.post("/v1/env/instances", json=body)).json()
        root = created["urls"]["root"]
        for call in plan_calls(draw_scenario("shop", data_key)):
            reply = await client.post(f"{root}mcp", json=post(*call), headers=CALL)
            assert reply.json()["result"].get("isError") is not True
        sql = {"query": "select customer_id, item_id, quantity from orders"}
        address = f"{root}api/v1/env/resources/sqlite/current/query"
        rows = (await client.post(address, json=sql)).json()["rows"]
        of = draw_scenario("shop", data_key)
        return rows == [[of.targets["customer_id"], of.targets["item_id"], of.slots["n"]]]

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert all(await asyncio.gather(*(episode(client, index) for index in range(30))))


def test_the_instance_wire_is_fleets(http: httpx.Client) -> None:
    instance = create(http, env_version="1", ttl_seconds=60, region="x", created_from="sdk")
    root, manager = instance["urls"]["root"], instance["urls"]["manager"]["api"]
    assert instance["status"] == "running"
    assert (instance["version"], instance["data_key"]) == ("v1", "train-000001")
    assert manager == f"{root}api/v1/env"
    assert http.get(f"{manager}/health").json()["service"] == "tracker"
    resources = http.get(f"{manager}/resources").json()
    assert [(entry["name"], entry["mode"]) for entry in resources] == [
        ("seed", "ro"),
        ("current", "rw"),
    ]
    tables = http.get(f"{manager}/resources/sqlite/seed/describe").json()["tables"]
    assert [table["name"] for table in tables] == ["issues", "task_facts"]
    assert tables[0]["columns"][0]["primary_key"] is True
    sql = "update issues set status = ?"
    written = query(http, root, "current", query=sql, args=["x"], read_only=False)
    assert (written["success"], written["rows_affected"], written["rows"]) == (True, 3, None)
    assert http.post(f"{manager}/reset", json={"seed": 1}).json()["success"] is True
    read = query(http, root, "current", query="select distinct status from issues")
    assert (read["columns"], read["rows"]) == (["status"], [["open"]])
    assert http.get("/v1/env/").json()[0]["env_key"] == "booking"


def test_instances_are_listed_and_deleted_by_run(http: httpx.Client) -> None:
    ids = {create(http, run_id="mine")["instance_id"] for _ in range(3)}
    other = create(http)["instance_id"]
    query_running = {"run_id": "mine", "status": "running"}
    listed = http.get("/v1/env/instances", params=query_running).json()
    assert {entry["instance_id"] for entry in listed} == ids
    deleted = http.delete("/v1/env/instances/batch", params={"run_id": "mine"}).json()
    assert {entry["instance_id"] for entry in deleted} == ids
    assert http.get("/v1/env/instances", params=query_running).json() == []
    assert http.get(f"/v1/env/instances/{other}").json()["status"] == "running"
    assert http.delete(f"/v1/env/instances/{other}").json()["status"] == "stopped"
    assert http.delete(f"/v1/env/instances/{other}").json()["status"] == "stopped"


def test_a_repeated_request_id_names_the_instance_it_made(http: httpx.Client) -> None:
    body = {"env_key": "shop", "data_key": "train-000001", "run_id": "test"}
    first, second = (
        http.post("/v1/env/instances", json=body, headers={"x-request-id": "r1"}) for _ in range(2)
    )
    assert second.status_code == 409
    assert second.json()["detail"]["instance_id"] == first.json()["instance_id"]


def test_an_instance_is_reaped_at_its_ttl(http: httpx.Client) -> None:
    instance = create(http, ttl_seconds=0.1)
    address = f"/v1/env/instances/{instance['instance_id']}"
    wait_until(lambda: http.get(address).json()["status"] != "running", 4.0)
    assert http.get(address).json()["termination_reason"] == "ttl"
    answer = http.post(f"{instance['urls']['root']}mcp", json={}, headers=CALL)
    assert answer.status_code == 404
    assert "has stopped (ttl)" in answer.json()["detail"]


def test_a_heartbeat_is_answered_with_its_deadline(http: httpx.Client) -> None:
    instance = create(http, heartbeat_interval=30)
    address = f"/v1/env/instances/{instance['instance_id']}/heartbeat"
    answer = http.post(address, json={}).json()
    assert answer["success"] is True
    assert 0 < answer["deadline_timestamp"] - time.time() <= 30


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "not JSON"),
        ("[]", 422, "valid dictionary"),
        ('{"env_key": "shop"}', 422, "data_key: Field required"),
        ('{"env_key": "bank", "data_key": "x"}', 400, "Environment 'bank' not found: use one of"),
        ('{"env_key": "shop", "data_key": "x"}', 400, "such as train-000123"),
        (
            '{"env_key": "shop", "data_key": "train-000001", "env_version": "v9"}',
            422,
            "env_version: Value error, version 'v9' not found: use 'v1'",
        ),
        (
            '{"env_key": "shop", "data_key": "train-000001", "ttl_seconds": -1}',
            422,
            "ttl_seconds: Input should be greater than 0",
        ),
        ('{"env_key": "' + "x" * 2**20 + '"}', 413, "too large"),
    ],
)
def test_a_bad_create_is_refused_precisely(
    http: httpx.Client, body: str, status: int, message: str
) -> None:
    answer = http.post("/v1/env/instances", content=body)
    assert answer.status_code == status
    assert message.lower() in answer.text.lower()


def test_bad_addresses_and_queries_are_refused_precisely(http: httpx.Client) -> None:
    root = create(http)["urls"]["root"]
    sqlite = f"{root}api/v1/env/resources/sqlite"
    assert http.get("/v1/env/instances/nope").json() == {"detail": "Instance 'nope' not found"}
    assert http.post("/nope/mcp", json={}, headers=CALL).status_code == 404
    assert http.get(f"{root}mcp").status_code == 405
    assert http.delete("/v1/env/instances/batch").status_code == 400
    assert http.post(f"{sqlite}/other/query", json={"query": "select 1"}).status_code == 404
    assert http.post(f"{sqlite}/seed/query", json={"sql": "select 1"}).status_code == 422
    write = {"query": "delete from issues", "read_only": False}
    assert http.post(f"{sqlite}/seed/query", json=write).status_code == 400
    refused = query(http, root, "current", query="select * from elsewhere")
    assert (refused["success"], refused["error"]) == (False, "no such table: elsewhere")
    assert http.get("/health", headers={"host": "evil.test"}).status_code == 400
    odd = query(http, root, "current", query="select 9e999, x'ff'")
    assert odd["rows"] == [[None, "ff"]]


def test_the_instance_limit_explains_how_to_raise_it(http: httpx.Client) -> None:
    for _ in range(40):
        create(http)
    body = {"env_key": "shop", "data_key": "train-000001"}
    answer = http.post("/v1/env/instances", json=body)
    assert answer.status_code == 403
    assert answer.json()["detail"]["error_type"] == "instance_limit_exceeded"
    assert "--max-instances" in answer.json()["detail"]["message"]


def test_a_token_is_required_and_sigterm_ends_the_server_with_success() -> None:
    with serving("--env", "shop", FLOTILLA_ENV_TOKEN="secret") as (process, address):
        with httpx.Client(base_url=address) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/env/").status_code == 401
            wrong = {"authorization": "Bearer guess"}
            assert client.get("/v1/env/", headers=wrong).status_code == 401
            right = {"authorization": "Bearer secret"}
            environments = client.get("/v1/env/", headers=right).json()
            assert [entry["env_key"] for entry in environments] == ["shop"]
            runner = {"x-runner-token": "secret"}
            assert client.get("/v1/env/", headers=runner).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_the_server_ends_with_its_parent() -> None:
    program = (
        "import subprocess, sys, time\n"
        "server = subprocess.Popen([sys.executable, '-m', 'flotilla_environments.serve',"
        " '--die-with-parent'], stdin=subprocess.DEVNULL)\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with started([sys.executable, "-c", program]) as (parent, line):
        assert parent.stdout is not None
        assert "url" in parent.stdout.readline()
        parent.kill()
        parent.wait()
        assert ended(int(line))


def test_the_server_ends_when_its_standard_input_closes() -> None:
    with serving("--die-with-parent") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        process.stdin = None


def ended(pid: int) -> bool:
    """Return whether a process, not our child, is gone within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_port_in_use_is_named() -> None:
    with serving() as (_, address):
        port = address.rsplit(":", 1)[1]
        second = subprocess.run(
            [sys.executable, "-m", "flotilla_environments.serve", "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
