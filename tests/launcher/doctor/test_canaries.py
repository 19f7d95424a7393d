"""An environment that cannot work is reported before a run, in its own words, within seconds."""

import hashlib
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.extras import install_command
from flotilla_common.process.spec_commands import PROGRAMS
from flotilla_common.spec.spec_loading import load_spec
from flotilla_environments.tasks import make_task
from flotilla_launcher.doctor.adapters.gateway_process import GatewayError
from flotilla_launcher.doctor.canaries import Canary
from flotilla_launcher.doctor.canary_results import PlayedEpisodes, key_of_episodes
from flotilla_launcher.doctor.findings import ProbeResult, Status
from tests.launcher.doctor import own_environment
from tests.launcher.doctor.adapters.test_gateway_probe import children
from tests.support.doctor import check, probed, sections, spec, subject

# On an idle machine; the test is that no probe waits for a deadline.
SOON_S = 40.0
BROKEN = "def lent(env:\n    return 1\n"
RAISES = "def lent(env, final_answer=None):\n    return int([][0])\n"


async def examined(path: Path, *overrides: str) -> ProbeResult:
    content = load_spec(path, overrides)
    return await probed("episodes", subject(content, path.parent))


async def test_an_own_server_of_four_tools_is_played_and_graded_before_each_run(
    policy: Path, tmp_path: Path
) -> None:
    """It may keep what a run wrote, so that an earlier grade says nothing."""
    path = own_environment.write(tmp_path, policy)
    reported = "library: 4 tools (find_books, give_back, lend, list_loans), doing nothing earns 0"
    for _ in range(2):
        check(await examined(path), Status.OK, reported)
    server = tmp_path / "server.py"
    server.write_text("from mcp.server.fastmcp import FastMCP\n")
    result = await examined(path)
    check(result, Status.FAIL, "library cannot be opened", "This is mcp 2", "of its own")
    assert not children()


async def test_instances_of_their_own_are_graded_and_then_not_again(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks)
    played = await probed("episodes", subject(content, tmp_path))
    check(played, Status.OK, "booking: 4 tools", "tracker: 3 tools")
    known = await probed("episodes", subject(content, tmp_path))
    check(known, Status.OK, "booking: graded ", "tracker: graded ", "nothing has changed since")


async def test_all_that_is_broken_is_named_at_once_in_its_own_words(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_environment.hide_bubblewrap(monkeypatch)
    path = own_environment.write(tmp_path, policy, listed=False)
    tasks = json.loads((tmp_path / "tasks.json").read_text())["tasks"]
    tasks += [
        {**task, "key": f"{env_key}-{task['key']}", "env_id": env_key}
        for task in tasks
        for env_key in ("down", "teleporter", "torn")
    ]
    broken = [
        {**task, "verifier_func": BROKEN} if task["env_id"] == "torn" else task for task in tasks
    ]
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": broken}))
    began = time.monotonic()
    result = await examined(
        path,
        "env_gateway.environments.down.backend=openenv",
        "env_gateway.backends.openenv.url=http://127.0.0.1:9",
        "env_gateway.environments.teleporter.backend=embedded",
    )
    assert time.monotonic() - began < SOON_S
    digest = hashlib.sha256(own_environment.VERIFIER.encode()).hexdigest()
    check(result, Status.FAIL, "library: no grade (execution_failed)", "bubblewrap", digest)
    torn = "the verifier does not compile: '(' was never closed, in line 1: def lent(env:"
    check(result, Status.FAIL, f"torn: no task can be graded; of 'torn-lend-0', {torn}")
    check(result, Status.FAIL, "teleporter cannot be opened: backend 'embedded' has no environment")
    check(result, Status.FAIL, "set env_gateway.environments.teleporter.backend; or correct env_id")
    check(result, Status.FAIL, "http://127.0.0.1:9/schema cannot be reached: Connection refused")
    check(result, Status.FAIL, "start the server, or correct env_gateway.backends.openenv.url")
    assert not children()


@pytest.mark.usefixtures("uncounted")
async def test_some_verifiers_that_do_not_compile_are_counted_and_refuse_no_run(
    policy: Path, tmp_path: Path
) -> None:
    tasks = [make_task("booking", "train", n) for n in range(3)]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{**tasks[0], "verifier_func": BROKEN}, *tasks[1:]]))
    result = await probed("episodes", subject(spec(policy, path), tmp_path))
    check(result, Status.WARN, "booking: 1 of its 3 tasks never get a grade", "does not compile")
    check(result, Status.WARN, "ok: booking: 4 tools", "doing nothing earns 0")


@pytest.mark.usefixtures("uncounted")
async def test_a_verifier_that_raises_on_an_untouched_task_is_reported_and_refuses_no_run(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy, verifier=RAISES)
    check(await examined(path), Status.WARN, "no grade (execution_failed): IndexError", "return 0")


async def test_a_list_of_verifiers_that_is_missing_is_named(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy)
    (tmp_path / "verifiers.sha256").unlink()
    result = await examined(path)
    check(result, Status.FAIL, "verifiers.digests: verifiers.sha256: ", "correct [env_gateway]")
    assert "install" not in result.detail


async def test_what_the_module_of_a_function_lacks_is_not_taken_for_a_package_of_the_gateway(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy)
    (tmp_path / "rewards.py").write_text("import nowhere\ndef graded(env): ...\n")
    function = f"--env_gateway.environments.library.verifier={tmp_path}/rewards:graded"
    result = await examined(path, function, '--env_gateway.verifiers.trusted=["rewards"]')
    wanted = ("library.verifier: ", "No module named 'nowhere' (rewards.py, line 1)")
    check(result, Status.FAIL, *wanted, "correct [env_gateway]")


def test_an_episode_that_a_function_grades_is_played_before_each_run(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    graded = "env_gateway.environments.library.verifier=rewards:graded"
    content = spec(policy, tasks, graded)
    assert key_of_task(content, tmp_path, own_environment.TASKS[0]) is None


async def test_a_package_that_the_gateway_lacks_is_named_with_what_brings_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def gateway(*_: object, **__: object) -> AsyncGenerator[tuple[str, str]]:
        raise GatewayError("it ended:\nModuleNotFoundError: No module named 'aiohttp'")
        yield "", ""

    monkeypatch.setattr("flotilla_launcher.doctor.adapters.gateway_probe.serve_gateway", gateway)
    fix = f"install aiohttp: {install_command('env-gateway')}, or `make setup`"
    check(await examined(own_environment.write(tmp_path, policy)), Status.FAIL, fix)


@pytest.mark.parametrize(
    ("change", "played"),
    [
        ({}, False),
        ({"prompt": "Lend another."}, False),
        ({"version": "v2"}, True),
        ({"data_id": "another"}, True),
        ({"data_version": "v2"}, True),
        ({"verifier_func": RAISES}, True),
        ({"offered_tools": ["lend"]}, True),
        ({"env_variables": {"LOGGED_IN_USER": "Ann"}}, True),
        ({"passes_untouched": True}, True),
    ],
)
def test_an_episode_is_known_by_version_and_verifier(
    policy: Path, tasks: Path, tmp_path: Path, change: dict[str, Any], played: bool
) -> None:
    task = {**own_environment.TASKS[0], "verifier_func": own_environment.VERIFIER}
    key = key_of_task(spec(policy, tasks), tmp_path, task)
    assert key is not None
    book = PlayedEpisodes(tmp_path)
    book.note_played([key], 1000.0)
    other = key_of_task(spec(policy, tasks), tmp_path, {**task, **change})
    assert other is not None
    assert (book.played_at(other, 2000.0) is None) is played
    assert book.played_at(key, 1000.0 + 8 * 86400) is None


def test_an_episode_is_played_again_with_another_dialect(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    def key(*overrides: str) -> str | None:
        return key_of_task(spec(policy, tasks, *overrides), tmp_path, own_environment.TASKS[0])

    assert key() == key() != key('rollout.dialect.name="full"')


def test_episodes_of_a_server_that_flotilla_starts_are_played_again_after_a_change_of_its_code(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "site" / "served_from_here" / "__init__.py"
    code.parent.mkdir(parents=True)
    code.touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(PROGRAMS, "env serve", "served_from_here")

    def key(*command: str) -> str | None:
        content = spec(policy, tasks)
        servers = [{"command": list(command), "instances": True}]
        content["env_gateway"] = {"backend": "mcp", "servers": servers}
        return key_of_task(content, tmp_path, own_environment.TASKS[0], "mcp")

    first = key("flotilla", "env", "serve")
    assert first is not None
    code.write_text("changed = True\n")
    assert key("flotilla", "env", "serve") != first
    assert key("some-program") is None


def key_of_task(
    content: dict[str, Any], folder: Path, task: dict[str, Any], backend: str = "embedded"
) -> str | None:
    """The key of a task's episodes."""
    about = subject(content, folder)
    about = replace(about, sections=sections(about.plan.tables))
    canary = Canary("library", backend, task, task.get("verifier_func", ""))
    return key_of_episodes(about, [canary])
