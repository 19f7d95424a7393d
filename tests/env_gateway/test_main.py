"""The gateway as a process: its command line, and the remains of a killed one."""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.text.parsing import TextLimits
from flotilla_env_gateway.adapters.http_client import exchange_json, open_http_session
from flotilla_env_gateway.config.backends import McpServer
from tests.support.environment_processes import environment_command
from tests.support.gateway_process import gateway_process, open_episode, write_spec
from tests.support.http_answers import Answer, serve_answers
from tests.support.started_process import serving_process
from tests.support.waiting import until_seen

SECTION = """
[env_gateway]
backend = "mcp"
drain_s = 0.1
[[env_gateway.servers]]
url = "{url}"
instances = true
"""


@pytest.fixture(scope="module")
def environments() -> Iterator[str]:
    """The URL of an environment server that outlives gateways."""
    command = environment_command("-m", "flotilla_environments.serve")
    with serving_process(command) as url:
        yield url


async def running(url: str) -> int:
    async with open_http_session(max_connections=1, headers={}) as http:
        listed = f"{url}/v1/env/instances?status=running"
        body, _ = await exchange_json(
            http, "GET", listed, timeout_s=5.0, limits=TextLimits(2**20, 2**16)
        )
        return len(body)


async def test_a_killed_gateway_leaves_nothing_running_once_it_is_started_again(
    environments: str, tmp_path: Path
) -> None:
    section = SECTION.format(url=environments)
    async with gateway_process(tmp_path, section) as (process, stub):
        for attempt in range(3):
            assert (await open_episode(stub, attempt)).state == pb.EPISODE_STATE_READY
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert await running(environments) == 3
    async with gateway_process(tmp_path, section) as (process, stub), asyncio.timeout(10.0):
        await until_seen(lambda: running(environments), lambda count: count == 0)
        assert (await open_episode(stub, 0)).state == pb.EPISODE_STATE_READY
        assert await running(environments) == 1
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await running(environments) == 0


async def test_a_gateway_may_hold_more_connections_than_the_usual_limit_on_files(
    environments: str, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        async with gateway_process(tmp_path, SECTION.format(url=environments)) as (process, _):
            allowed = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == min(hard, 65536) > 1024


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flotilla_env_gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_configuration_is_checked_without_starting_anything(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, SECTION.format(url="http://127.0.0.1:1"))
    assert run("--config", str(spec), "--check-config").returncode == 0
    wrong = run("--config", str(spec), "--check-config", "--env_gateway.lease_tll_s=3")
    assert wrong.returncode == 2
    assert "lease_ttl_s" in wrong.stderr


def test_a_function_that_cannot_be_imported_is_found_without_starting_anything(
    tmp_path: Path,
) -> None:
    (tmp_path / "rewards.py").write_text("import nowhere\ndef graded(env): ...\n")
    section = SECTION.format(url="http://127.0.0.1:1")
    section += '[env_gateway.environments.notes]\nverifier = "rewards:graded"\n'
    section += '[env_gateway.verifiers]\ntrusted = ["rewards"]\n'
    checked = run("--config", str(write_spec(tmp_path, section)), "--check-config")
    assert checked.returncode == 2
    assert f"notes.verifier: {tmp_path}/rewards:graded: importing rewards failed" in checked.stderr
    assert "No module named 'nowhere' (rewards.py, line 1)" in checked.stderr


def test_the_help_lists_every_key_of_a_server_with_its_default() -> None:
    listed = run("--help").stdout.split()
    prefix = "--env_gateway.servers.0."
    keys = [word.removeprefix(prefix).partition("=")[0] for word in listed if prefix in word]
    assert sorted(keys) == sorted(McpServer.model_fields)
    for default in ("transport=http", "start_timeout_s=60.0", "read_only_tools=()"):
        assert f"{prefix}{default}" in listed


async def test_the_key_of_each_server_is_hidden_whatever_the_name_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"OFFICE_ONE": "alpha-0123456789", "OFFICE_TWO": "bravo-0123456789"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)

    def repeat_key(request: BaseHTTPRequestHandler) -> Answer:
        key = request.headers["authorization"].removeprefix("Bearer ")
        return 401, {"content-type": "text/plain"}, f"unknown key {key}".encode()

    for number, name in enumerate(values):
        with serve_answers(repeat_key) as url:
            section = f"""
[env_gateway]
backend = "mcp"
environments.booking.servers = ["s{number}"]
[[env_gateway.servers]]
name = "s0"
url = "{url}"
api_key_env = "OFFICE_ONE"
[[env_gateway.servers]]
name = "s1"
url = "{url}"
api_key_env = "OFFICE_TWO"
"""
            async with gateway_process(tmp_path, section) as (process, stub):
                failed = await open_episode(stub, 0)
                process.terminate()
                assert process.stderr is not None
                log = (await process.stderr.read()).decode()
        said = f"HTTP 401: unknown key ***; its key is that of the variable {name}"
        assert said in failed.detail
        shown = failed.detail + log
        assert [value for value in values.values() if value in shown] == [], shown
