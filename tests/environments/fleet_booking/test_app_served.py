"""fleet_booking as it is used: over HTTP, and with a file of Fleet's tasks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client import Client
from mcp.types import TextContent

from flotilla_environments.api import Instance, ToolError, open_instance
from flotilla_environments.tasks import load_tasks
from tests.environments.test_serve import serving

DATES = {"check_in_date": "2026-05-04", "check_out_date": "2026-05-07"}


@pytest.fixture
def root() -> Iterator[str]:
    """The address of an instance that is served over HTTP."""
    with serving("--env", "fleet_booking") as (_, url):
        body = {"env_key": "fleet_booking", "data_key": "kinesis", "data_version": "v0.0.15"}
        made = httpx.post(f"{url}/v1/env/instances", json=body, timeout=10)
        yield made.json()["urls"]["root"]


async def test_over_mcp_the_results_are_the_same(root: str) -> None:
    calls = [
        ("search_hotels", {"location": "Rome", "max_price": 180}),
        ("create_booking", {"room_id": 22623, "adults": 2, **DATES}),
        ("create_booking", {"room_id": 22623, "adults": 9, **DATES}),
    ]
    local = open_instance("fleet_booking", "kinesis")
    async with Client(f"{root}mcp") as client:
        for name, arguments in calls:
            result = await client.call_tool(name, arguments)
            assert isinstance(result.content[0], TextContent)
            assert result.content[0].text == reports(local, name, arguments)


def reports(site: Instance, name: str, arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(site.call(name, arguments))
    except ToolError as error:
        return str(error)


def rewrite(tmp_path: Path, tasks: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "fleet.json").write_text(json.dumps(tasks))
    command = [sys.executable, "-m", "flotilla_environments.fleet_booking", "tasks"]
    files = [str(tmp_path / "fleet.json"), "--out", str(tmp_path / "out" / "tasks.json")]
    return subprocess.run([*command, *files], capture_output=True, text=True, timeout=30)


def test_fleets_tasks_are_rewritten_for_this_app(tmp_path: Path) -> None:
    theirs = {
        "key": "task_a_1",
        "prompt": "p",
        "env_id": "booking",
        "version": "v0.0.74",
        "data_id": "kinesis",
        "data_version": "v0.0.14",
        "verifier_func": "def verify(env): return 1",
        "env_variables": {"LOGGED_IN_NAME": "Somebody"},
    }
    other = theirs | {"key": "task_b_2", "env_id": "tickets"}
    done = rewrite(tmp_path, [theirs, other])
    assert done.returncode == 0, done.stderr
    assert "1 tasks, 1 of other environments or data left out" in done.stderr
    (ours,) = load_tasks(tmp_path / "out" / "tasks.json")
    assert (ours["env_id"], ours["version"]) == ("fleet_booking", "v1")
    assert ours["env_variables"]["CURRENT_DATE"] == "2026-01-02"
    assert ours["env_variables"]["LOGGED_IN_NAME"] == "Somebody"
    kept = ("key", "prompt", "data_id", "data_version", "verifier_func")
    assert all(ours[name] == theirs[name] for name in kept)
    refused = rewrite(tmp_path, [other])
    assert refused.returncode == 1
    assert "has no task with env_id booking and data_id kinesis" in refused.stderr
