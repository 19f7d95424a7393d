"""The environment of the gateway's children: nothing that is secret, unless the spec gives
it to them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_format import parse_task
from flotilla_common.text import redaction
from flotilla_common.text.redaction import add_secret
from flotilla_env_gateway.adapters.child_process import ChildProcess
from flotilla_env_gateway.adapters.embedded.pool import WorkerPool
from flotilla_env_gateway.adapters.fleet_openenv.worker_process import FleetTaskEnvProcess
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.adapters.server_address import connect_server
from flotilla_env_gateway.adapters.supervised_server import SupervisedServer
from flotilla_env_gateway.config.backends import FleetOpenEnvConfig, McpServer
from flotilla_env_gateway.ports import ProvisionRequest
from tests.support.fake_gateway import task_json
from tests.support.waiting import until

CANARIES = {
    name: f"canary-{name.lower()}-0123456789"
    for name in (
        *("FLOTILLA_TOKEN", "FLOTILLA_TLS", "FLEET_API_KEY", "HF_TOKEN", "OPENAI_API_KEY"),
        *("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN_SETTING", "GITHUB_PAT"),
    )
}
WAITING = (sys.executable, "-c", "import sys; sys.stdin.read()")
SERVING = (
    *(sys.executable, "-c"),
    'import sys; print(\'{"url": "http://127.0.0.1:9"}\', flush=True); sys.stdin.read()',
)


@pytest.fixture(autouse=True)
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(redaction, "_secrets", set[str]())
    monkeypatch.setattr(redaction, "_hidden", list[str]())
    yield


async def environment(pid: int) -> dict[str, str]:
    # While it becomes another program it has none.
    await until(lambda: _read(pid) != {})
    return _read(pid)


def _read(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    pairs = (each.partition("=") for each in text.split("\0") if each)
    return {name: value for name, _, value in pairs}


def seen(found: dict[str, str]) -> set[str]:
    assert "PATH" in found, "it was read"
    return {name for name, value in CANARIES.items() if value in str(found)}


async def stdio(**env: str) -> dict[str, str]:
    backend = McpStdioBackend(McpServer(transport="stdio", command=WAITING, env=env))
    try:
        task = parse_task(task_json(data_id="monday"))
        await backend.provision_instance(ProvisionRequest("e1", task, 60.0), timeout_s=20.0)
        episode, _ = backend._running["e1"]  # pyright: ignore[reportPrivateUsage]
        return await environment(episode.processes.children[0].pid)
    finally:
        await backend.close()


async def test_a_server_over_stdio_gets_its_episode_and_what_the_spec_gives_it() -> None:
    found = await stdio()
    assert seen(found) == set()
    assert found["FLOTILLA_DATA_KEY"] == "monday"
    found = await stdio(TOKEN="$GITHUB_PAT", MODE="strict")
    assert seen(found) == {"GITHUB_PAT"}
    assert (found["TOKEN"], found["MODE"]) == (CANARIES["GITHUB_PAT"], "strict")
    assert "GITHUB_PAT" not in found, "only under the name that the server knows it by"


async def test_a_server_over_http_gets_a_key_of_ours_and_what_the_spec_gives_it() -> None:
    config = McpServer(command=SERVING, env={"TOKEN": "$GITHUB_PAT"}, start_timeout_s=30.0)
    address, headers = connect_server(config, where="env_gateway.servers.0")
    try:
        await address.wait_for_url(30.0)
        assert isinstance(address, SupervisedServer) and address.pid is not None
        found = await environment(address.pid)
        assert seen(found) == {"GITHUB_PAT"}
        assert headers["authorization"] == f"Bearer {found['FLOTILLA_ENV_TOKEN']}"
    finally:
        await address.close()


async def test_workers_of_our_own_get_no_secret() -> None:
    pool = WorkerPool(size=1, hang_s=30.0)
    try:
        worker = await pool.pick_worker(30.0)
        assert seen(await environment(worker.pid)) == set()
    finally:
        await pool.close()


async def test_a_worker_of_fleets_environment_gets_only_its_own_key() -> None:
    own = {"FLEET_API_KEY": CANARIES["FLEET_API_KEY"]}
    worker = await FleetTaskEnvProcess.start_process(
        WAITING, own, FleetOpenEnvConfig().answer_limits
    )
    try:
        assert seen(await environment(worker.pid)) == {"FLEET_API_KEY"}
    finally:
        await worker.kill()


async def test_the_output_of_a_command_is_passed_on_without_the_secrets_that_it_was_given(
    capfd: pytest.CaptureFixture[str],
) -> None:
    add_secret(CANARIES["GITHUB_PAT"])
    expected = "import os, sys; sys.stderr.write('x' * 70_000 + os.environ['A'] + '\\nlast words')"
    command = (sys.executable, "-c", expected)
    process = await ChildProcess.start(command, {"A": CANARIES["GITHUB_PAT"]})
    assert (await process.describe_end()).endswith("last words")
    await process.close()
    output = capfd.readouterr().err
    assert CANARIES["GITHUB_PAT"] not in output and "***\nlast words" in output


def test_a_variable_that_is_given_and_not_set_is_named() -> None:
    config = McpServer(command=SERVING, env={"TOKEN": "$NOBODY_SET_THIS"})
    with pytest.raises(
        ConfigError, match=r"servers\.0\.env\.TOKEN is \$NOBODY_SET_THIS, which is not"
    ):
        connect_server(config, where="env_gateway.servers.0")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "http://h", "env": {"A": "b"}}, "for the process of a command"),
        ({"command": ("x",), "env": {"A=B": "c"}}, "no name of a variable"),
        ({"command": ("x",), "env": {"A": "$lower"}}, r"write '\$lower' as \$NAME"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        McpServer.model_validate(settings)


def test_a_url_of_fleets_control_plane_still_has_processes_to_give_to() -> None:
    assert FleetOpenEnvConfig(env={"A": "b"}).env == {"A": "b"}
