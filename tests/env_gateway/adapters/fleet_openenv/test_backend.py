"""FleetTaskEnv in its process: killed at deadlines, with no remains.

The fork is not on any package index. What is tested here is the adapter, on a stand-in package of
the same shape; with OPENENV_FORK_PATH set, the contract suite runs on the fork itself.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_format import parse_task
from flotilla_common.text.parsing import TextLimits
from flotilla_env_gateway.adapters.fleet_openenv.backend import (
    FleetOpenEnvBackend,
    build_fleet_openenv_backend,
)
from flotilla_env_gateway.adapters.fleet_openenv.codec import parse_parts
from flotilla_env_gateway.adapters.fleet_openenv.instance import FleetOpenEnvInstance
from flotilla_env_gateway.adapters.fleet_openenv.worker_process import FleetTaskEnvProcess
from flotilla_env_gateway.config.backends import FleetOpenEnvConfig
from flotilla_env_gateway.ports import (
    BackendError,
    CheckReport,
    Execution,
    Media,
    Orphan,
    ProvisionRequest,
    QueryError,
    Submission,
    Text,
)
from tests.env_gateway.adapters.fleet_openenv.fleet_openenv_fork import ControlPlane, write_fork
from tests.support.fake_gateway import task_json
from tests.support.waiting import until


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    write_fork(tmp_path)
    return tmp_path


@pytest.fixture
async def plane() -> AsyncGenerator[ControlPlane]:
    plane = ControlPlane()
    async with plane.serving():
        yield plane


@pytest.fixture
async def backend(
    fork: Path, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[FleetOpenEnvBackend]:
    monkeypatch.setenv("FLEET_API_KEY", "a-key")
    monkeypatch.setenv("FLOTILLA_TOKEN", "the run's own token")
    backend = build_fleet_openenv_backend(
        FleetOpenEnvConfig(url=plane.url, path=str(fork)), max_calls=8
    )
    yield backend
    await backend.close()


def request(**changes: Any) -> ProvisionRequest:
    return ProvisionRequest("run.gw.1-1", parse_task(task_json(**changes)), ttl_s=60.0)


@asynccontextmanager
async def opened(
    backend: FleetOpenEnvBackend, **changes: Any
) -> AsyncGenerator[FleetOpenEnvInstance]:
    instance = await backend.provision_instance(request(**changes), timeout_s=5.0)
    try:
        await instance.list_tools(timeout_s=5.0)
        yield instance
    finally:
        await instance.close(timeout_s=5.0)
        assert not psutil.pid_exists(instance.pid)


async def test_an_instance_is_named_tagged_called_and_deleted(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    async with opened(backend) as instance:
        assert plane.running == {instance.instance_id: "run.gw.1-1"}
        assert plane.keys == {"Bearer a-key"}
        assert instance.env_version == "v7"
        tools = await instance.list_tools(timeout_s=5.0)
        assert [tool.name for tool in tools] == ["echo", "hang", "crash", "fail"]
        assert await instance.get_first_observation(timeout_s=5.0) == ()
        result = await instance.call_tool("echo", {"value": {"id": 2}}, timeout_s=5.0)
        assert result.parts == (Text('{"id": 2}'),)
        assert not result.is_error
        with pytest.raises(QueryError):
            await instance.query_database("seed", "SELECT 1", (), timeout_s=5.0)
    assert plane.running == {}


async def test_what_a_tool_refuses_is_reported_as_its_error(backend: FleetOpenEnvBackend) -> None:
    async with opened(backend) as instance:
        result = await instance.call_tool("echo", {"value": {"error": "no room"}}, timeout_s=5.0)
        assert (result.parts, result.is_error) == ((Text("no room"),), True)


@pytest.mark.parametrize(
    ("message", "delivered"),
    [
        ("call_tool(x) failed after 8 attempts", None),
        ("Tool 'x' not found on any active MCP endpoint.", False),
    ],
)
async def test_a_call_that_failed_may_have_been_executed_unless_the_tool_was_not_found(
    backend: FleetOpenEnvBackend, message: str, delivered: bool | None
) -> None:
    async with opened(backend) as instance:
        with pytest.raises(BackendError) as caught:
            await instance.call_tool("fail", {"message": message}, timeout_s=5.0)
        assert (caught.value.delivered, caught.value.lost) == (delivered, False)
        assert (await instance.call_tool("echo", {"value": 1}, timeout_s=5.0)).parts == (Text("1"),)


async def test_a_deadline_ends_the_process_that_swallows_cancellation(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    async with opened(backend) as instance:
        with pytest.raises(BackendError, match="did not answer") as caught:
            await instance.call_tool("hang", {}, timeout_s=0.2)
        assert (caught.value.kind, caught.value.delivered) == ("timeout", None)
        assert not psutil.pid_exists(instance.pid)
        with pytest.raises(BackendError) as caught:
            await instance.call_tool("echo", {"value": 1}, timeout_s=5.0)
        assert (caught.value.delivered, caught.value.lost) == (False, True)
    assert plane.running == {}


async def test_a_call_that_is_given_up_ends_the_process(backend: FleetOpenEnvBackend) -> None:
    async with opened(backend) as instance:
        calling = asyncio.create_task(instance.call_tool("hang", {}, timeout_s=60.0))
        await asyncio.sleep(0.1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: not psutil.pid_exists(instance.pid))


@pytest.mark.parametrize("name", ["fail", "crash"])
async def test_an_instance_that_has_ended_is_distinguished_from_one_that_fails(
    backend: FleetOpenEnvBackend, plane: ControlPlane, name: str
) -> None:
    async with opened(backend) as instance:
        plane.running.clear()
        with pytest.raises(BackendError, match="has no instance") as caught:
            await instance.call_tool(name, {"message": "failed after 8 attempts"}, timeout_s=5.0)
        assert (caught.value.delivered, caught.value.lost) == (False, True)


async def test_a_process_that_crashes_loses_the_instance_and_its_grade(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    async with opened(backend) as instance:
        with pytest.raises(BackendError, match="ended") as caught:
            await instance.call_tool("crash", {}, timeout_s=5.0)
        assert (caught.value.delivered, caught.value.lost) == (None, True)
        submission = Submission(request().task, None, None)
        execution = await instance.grade_submission(submission, timeout_s=5.0)
        assert execution is not None and execution.instance_lost
        assert plane.running
    assert plane.running == {}


async def test_the_grade_is_fleet_task_envs_with_answer_and_conversation(
    backend: FleetOpenEnvBackend,
) -> None:
    async with opened(backend) as instance:
        submission = Submission(request().task, "42", '[{"role": "user"}]')
        for _ in range(2):
            execution = await instance.grade_submission(submission, timeout_s=5.0)
            assert execution is not None
            assert (execution.result, execution.error) == (1.0, None)
            assert execution.stdout == "42 [{'role': 'user'}]"


async def test_what_a_verifier_returned_is_known_beside_fleet_task_envs_reward(
    backend: FleetOpenEnvBackend,
) -> None:
    async with opened(backend, verifier_func="reported") as instance:
        execution = await instance.grade_submission(
            Submission(request().task, "42", None), timeout_s=5.0
        )
    assert execution == Execution(result=0.0, report=CheckReport(("a",), ("b",)), stdout="42")


async def test_a_reward_that_was_withheld_for_what_was_printed_is_judged_here(
    backend: FleetOpenEnvBackend,
) -> None:
    """The verdict depends on who may have printed it, which FleetTaskEnv does not check."""
    async with opened(backend, verifier_func="printed") as instance:
        execution = await instance.grade_submission(
            Submission(request().task, "JUDGE ERROR: x", None), timeout_s=5.0
        )
    assert execution == Execution(result=0, stdout="JUDGE ERROR: x")


async def test_a_transcript_that_is_none_gives_no_grade(backend: FleetOpenEnvBackend) -> None:
    async with opened(backend) as instance:
        execution = await instance.grade_submission(
            Submission(request().task, "42", "[}"), timeout_s=5.0
        )
        assert execution is not None and execution.result is None
        assert "transcript" in (execution.error or "")


async def test_a_grade_that_is_not_known_is_no_result(backend: FleetOpenEnvBackend) -> None:
    async with opened(backend, verifier_func="unknown") as instance:
        execution = await instance.grade_submission(
            Submission(request().task, None, None), timeout_s=5.0
        )
        assert execution is not None
        assert (execution.result, execution.error) == (None, "Judge error")
        assert execution.stdout == "None None"


async def test_a_screen_is_shown_at_the_start(backend: FleetOpenEnvBackend) -> None:
    async with opened(backend, task_modality="browser_use") as instance:
        (shown,) = await instance.get_first_observation(timeout_s=5.0)
        assert isinstance(shown, Media)
        assert (shown.data, shown.mime) == (b"\x89PNG", "image/png")


async def test_an_environment_that_does_not_exist_is_refused_for_good(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    others = psutil.Process().children()
    with pytest.raises(BackendError, match="'nowhere' not found") as caught:
        await backend.provision_instance(request(env_id="nowhere"), timeout_s=5.0)
    assert caught.value.invalid
    assert psutil.Process().children() == others
    assert plane.running == {}


async def test_what_is_never_ready_ends_at_the_deadline_and_is_deleted(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    instance = await backend.provision_instance(request(prompt="never ready"), timeout_s=5.0)
    with pytest.raises(BackendError, match="did not answer"):
        await instance.list_tools(timeout_s=0.2)
    await instance.close(timeout_s=5.0)
    assert plane.running == {}


async def test_a_reset_that_fails_is_reported(backend: FleetOpenEnvBackend) -> None:
    instance = await backend.provision_instance(request(prompt="no tools"), timeout_s=5.0)
    with pytest.raises(BackendError, match="list_tools returned no tools"):
        await instance.list_tools(timeout_s=5.0)
    await instance.close(timeout_s=5.0)


async def test_an_instance_is_found_by_its_tag_alone(
    backend: FleetOpenEnvBackend, plane: ControlPlane
) -> None:
    instance = await backend.provision_instance(request(), timeout_s=5.0)
    os.kill(instance.pid, 9)
    await backend.reclaim_orphan(Orphan("run.gw.1-1"), timeout_s=5.0)
    assert plane.running == {}
    await instance.close(timeout_s=5.0)


def test_without_the_fork_the_error_names_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENENV_FORK_PATH", raising=False)
    with pytest.raises(ConfigError, match="OPENENV_FORK_PATH"):
        build_fleet_openenv_backend(FleetOpenEnvConfig(), max_calls=1)
    with pytest.raises(ConfigError, match="holds neither"):
        build_fleet_openenv_backend(FleetOpenEnvConfig(path=str(tmp_path)), max_calls=1)


async def test_an_interpreter_without_the_forks_needs_is_reported(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "a-key")
    package = tmp_path / "envs" / "fleet_env"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import a_package_that_nobody_has")
    for python, message in (
        (sys.executable, "a_package_that_nobody_has"),
        (str(tmp_path / "python"), "ended"),
    ):
        config = FleetOpenEnvConfig(url=plane.url, path=str(tmp_path), python=python)
        backend = build_fleet_openenv_backend(config, max_calls=1)
        with pytest.raises(BackendError, match=message):
            await backend.provision_instance(request(), timeout_s=5.0)
        await backend.close()


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        ("plain", [Text("plain")]),
        ({"a": 1}, [Text('{"a": 1}')]),
        (["a", "b"], [Text('["a", "b"]')]),
        ([{"type": "text", "text": "a"}], [Text('[{"type": "text", "text": "a"}]')]),
        (None, [Text("null")]),
        ({"error": "x"}, [Text("x")]),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}],
            [Text("data:image/png;base64,?")],
        ),
    ],
)
def test_a_result_is_taken_apart_again(result: Any, parts: list[Text]) -> None:
    assert list(parse_parts(result)) == parts


@pytest.mark.parametrize("line", ["[" * 200 + "]" * 200, "[" + "0," * 2**12 + "0]", "{"])
async def test_an_answer_that_is_too_much_ends_the_process(line: str) -> None:
    limits = TextLimits(bytes=2**16, values=2**10)
    worker = await FleetTaskEnvProcess.start_process(("echo", line), {}, limits)
    with pytest.raises(BackendError, match="answer cannot be read") as caught:
        await worker.read_answer(timeout_s=10.0)
    assert (caught.value.kind, caught.value.lost) == ("protocol", True)
    with pytest.raises(BackendError, match="was ended"):
        await worker.send_request({}, timeout_s=1.0)
