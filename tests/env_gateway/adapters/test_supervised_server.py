"""A supervised server: what it writes, and what it leaves behind."""

import sys

import pytest

from flotilla_env_gateway.adapters.supervised_server import SupervisedServer
from tests.env_gateway.adapters.process_modes import MODES, use_mode
from tests.support.loop_watch import watched_loop
from tests.support.marked_processes import Mark
from tests.support.waiting import until

_URL = '{"url": "http://127.0.0.1:9"}'


def program(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import os, subprocess, sys, time\n{script}")


async def test_the_url_is_found_after_a_flood_and_written_without_an_end_of_line() -> None:
    script = f"os.write(1, b'{{}}\\n' * 10 + b'\\n' * 2**21 + b'x' * 2**20 + b'\\n{_URL}')"
    server = SupervisedServer(program(script), start_timeout_s=60)
    try:
        assert await server.wait_for_url(60.0) == "http://127.0.0.1:9"
    finally:
        await server.close()


async def test_flotillas_own_environments_are_served_without_its_command_line() -> None:
    """A machine may have only the gateway and the environments: no launcher, no `flotilla`."""
    mark = Mark()
    command = ("flotilla", "env", "serve", "--port", "0")
    server = SupervisedServer(command, start_timeout_s=60, environment=mark.environment)
    try:
        assert (await server.wait_for_url(60.0)).startswith("http://127.0.0.1:")
        found = "\n".join(mark.find_commands())
        assert "-m flotilla_environments.serve --port 0" in found
        assert "flotilla_launcher" not in found
    finally:
        await server.close()


@pytest.mark.parametrize("text", ["\n", "{\n", "x"])
async def test_a_flood_does_not_hold_the_loop(text: str) -> None:
    script = f"while True: os.write(1, {text.encode() * (2**16 // len(text))!r})"
    async with watched_loop() as watch:
        server = SupervisedServer(program(script), start_timeout_s=1.0)
        await until(lambda: server.generation == 1)
        await server.close()
    assert watch.longest_s < 0.05


@pytest.mark.parametrize("mode", MODES)
async def test_what_a_server_started_ends_with_it(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode(mode, monkeypatch)
    mark = Mark()
    script = (
        "subprocess.Popen(['sleep', '86400'], start_new_session=True)\n"
        f"print({_URL!r}, flush=True)\n"
        "sys.stdin.read()"
    )
    server = SupervisedServer(program(script), start_timeout_s=60, environment=mark.environment)
    await server.wait_for_url(60.0)
    await mark.wait_for("sleep 86400", 1)
    await server.close()
    assert mark.find_commands() == []
