"""The openenv backend against servers of the openenv package, as processes.

What every backend does is in `backends/`; here is what only this protocol has.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.openenv.backend import OpenEnvBackend, build_openenv_backend
from flotilla_env_gateway.adapters.openenv.instance import OpenEnvInstance
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.config.openenv import OpenEnvConfig
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    CheckReport,
    Execution,
    Media,
    ProvisionRequest,
    QueryError,
    Submission,
    Text,
    Tool,
)
from flotilla_environments.api import ENV_KEYS, open_instance
from flotilla_environments.local_verifier import run_verifier
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from tests.support.fake_gateway import open_spec, opened, states
from tests.support.grading_gateway import grading_gateway
from tests.support.openenv_servers import example_command
from tests.support.started_process import serving_process

TASK: Mapping[str, Any] = {
    "key": "task-1",
    "prompt": "Do it.",
    "env_id": "odd",
    "env_variables": {"level": 3},
}


def serving(kind: str, *options: str) -> AbstractContextManager[str]:
    return serving_process(example_command(kind, *options))


@pytest.fixture(scope="module")
def tickets() -> Iterator[str]:
    with serving("tickets") as url:
        yield url


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with serving("echo") as url:
        yield url


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    with serving("odd", "--limit", "2") as url:
        yield url


@asynccontextmanager
async def backend_at(url: str, **settings: Any) -> AsyncGenerator[OpenEnvBackend]:
    backend = build_openenv_backend(OpenEnvConfig(url=url, **settings), max_calls=4)
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def instance_at(url: str, **settings: Any) -> AsyncGenerator[OpenEnvInstance]:
    async with backend_at(url, **settings) as backend:
        instance = await first_place(backend)
        await instance.list_tools(timeout_s=5.0)
        yield instance
        await instance.close(timeout_s=5.0)


async def first_place(backend: OpenEnvBackend) -> OpenEnvInstance:
    """A server learns a little later that a test before has dropped its session."""
    async with asyncio.timeout(10.0):
        while True:
            try:
                return await backend.provision_instance(provision(), timeout_s=5.0)
            except BackendError as error:
                if error.kind != "throttled":
                    raise
                await asyncio.sleep(0.05)


def provision(**changes: Any) -> ProvisionRequest:
    return ProvisionRequest("run.gw.1-1", parse_task(json.dumps({**TASK, **changes})), ttl_s=60.0)


async def grade(instance: OpenEnvInstance) -> Execution | None:
    return await instance.grade_submission(Submission(provision().task, "", None), timeout_s=5.0)


async def test_tools_of_an_mcp_environment_have_their_schemas_and_results(tickets: str) -> None:
    async with instance_at(tickets, read_only_tools=["screenshot"]) as instance:
        tools = {tool.name: tool for tool in await instance.list_tools(timeout_s=5.0)}
        assert list(tools) == ["close_ticket", "screenshot"]
        assert (tools["close_ticket"].read_only, tools["screenshot"].read_only) == (False, True)
        assert json.loads(tools["close_ticket"].input_schema_json)["type"] == "object"
        result = await instance.call_tool("close_ticket", {"ticket_id": 2}, timeout_s=5.0)
        assert isinstance(result.parts[0], Text)
        assert json.loads(result.parts[0].text) == {"closed": 2}
        assert (result.reward, result.done) == (-0.25, False)
        shown = (await instance.call_tool("screenshot", {}, timeout_s=5.0)).parts[0]
        assert isinstance(shown, Media)
        assert (shown.mime, shown.width, shown.height) == ("image/png", 2, 3)


async def test_a_tool_that_raises_is_reported_to_the_policy(tickets: str) -> None:
    async with instance_at(tickets) as instance:
        result = await instance.call_tool("close_ticket", {"ticket_id": 10}, timeout_s=5.0)
        assert result.is_error and isinstance(result.parts[0], Text)
        assert "no ticket 10" in result.parts[0].text
        assert (await instance.call_tool("close_ticket", {"ticket_id": 1}, timeout_s=5.0)).done


@pytest.mark.parametrize(("reward", "expected"), [("last", 1.0), ("sum", 0.75)])
async def test_the_grade_is_made_of_the_rewards(tickets: str, reward: str, expected: float) -> None:
    async with instance_at(tickets, reward=reward) as instance:
        for ticket_id in (2, 1):
            await instance.call_tool("close_ticket", {"ticket_id": ticket_id}, timeout_s=5.0)
        assert await grade(instance) == Execution(result=expected)


async def test_the_tool_that_ends_an_episode_is_called_by_grading_alone(tickets: str) -> None:
    settings = {"submit_tool": "close_ticket", "submit_argument": "ticket_id"}
    async with instance_at(tickets, **settings) as instance:
        assert [tool.name for tool in await instance.list_tools(timeout_s=5.0)] == ["screenshot"]
        for _ in range(2):
            submission = Submission(provision().task, "1", None)
            assert await instance.grade_submission(submission, timeout_s=5.0) == Execution(
                result=1.0
            )


async def test_a_submission_that_is_refused_gives_no_grade(tickets: str) -> None:
    settings = {"submit_tool": "close_ticket", "submit_argument": "ticket_id"}
    async with instance_at(tickets, **settings) as instance:
        submission = Submission(provision().task, "77", None)
        execution = await instance.grade_submission(submission, timeout_s=5.0)
        assert execution is not None and execution.result is None
        assert "no ticket 77" in (execution.error or "")


async def test_the_address_of_the_socket_will_do(tickets: str) -> None:
    async with instance_at(tickets.replace("http://", "ws://")) as instance:
        assert await instance.list_tools(timeout_s=5.0)


async def test_with_the_tasks_own_verifier_the_rewards_are_no_grade(odd: str) -> None:
    async with instance_at(odd, reward="verifier") as instance:
        assert await grade(instance) is None


@pytest.mark.parametrize("reward", ["last", "sum"])
async def test_the_reward_that_comes_with_a_reset_is_no_grade(echo: str, reward: str) -> None:
    async with backend_at(echo, reward=reward) as backend:
        instance = await first_place(backend)
        (shown,) = await instance.get_first_observation(timeout_s=5.0)
        assert isinstance(shown, Text) and "environment ready" in shown.text
        assert await grade(instance) == Execution(error="the environment gave no reward")
        await instance.call_tool("step", {"message": "hello"}, timeout_s=5.0)
        assert await grade(instance) == Execution(result=0.5)
        await instance.close(timeout_s=5.0)


async def test_an_environment_that_gives_no_reward_gives_no_grade(odd: str) -> None:
    config = EnvGatewayConfig.model_validate(
        {"backend": "openenv", "backends": {"openenv": {"url": odd}}}
    )
    async with (
        backend_at(odd) as backend,
        grading_gateway({"openenv": backend}, config) as gateway,
    ):
        session = await opened(gateway, open_spec(task=json.dumps(TASK)))
        answer, _ = await gateway.call_tool(session, 0, "step", '{"how": "nothing"}', 5.0)
        assert answer.outcome is ToolOutcome.OK
        graded = await gateway.grade_episode(session, "", None, 5.0)
        assert (graded.reward, graded.reason) == (None, NoGradeReason.EXECUTION_FAILED)
        assert graded.detail == "the environment gave no reward"


async def test_reset_receives_what_the_configuration_names(tickets: str) -> None:
    fields = {"seed": "seed", "level": "env_variables.level", "of": "env_key", "none": "data_key"}
    async with instance_at(tickets, task_fields=fields) as instance:
        (part,) = await instance.get_first_observation(timeout_s=1.0)
        assert isinstance(part, Text)
        sent = json.loads(part.text)["told"]
        assert (sent["level"], sent["of"], set(sent)) == (3, "odd", {"level", "of", "seed"})
        assert 0 <= sent["seed"] < 2**31


async def test_an_action_of_its_own_is_offered_as_one_tool(odd: str) -> None:
    async with instance_at(odd, step_tool="act", image_fields=["said"]) as instance:
        (tool,) = await instance.list_tools(timeout_s=5.0)
        schema = json.loads(tool.input_schema_json)
        assert (tool.name, list(schema["properties"])) == ("act", ["how"])
        parts = (await instance.call_tool("act", {"how": "image"}, timeout_s=5.0)).parts
        assert [type(part) for part in parts] == [Media, Media]


async def test_an_action_that_does_not_fit_its_schema_was_not_executed(odd: str) -> None:
    async with instance_at(odd) as instance:
        with pytest.raises(BackendError, match="how: Field required") as caught:
            await instance.call_tool("step", {"nonsense": 1}, timeout_s=5.0)
        assert (caught.value.bad_arguments, caught.value.delivered) == (True, False)
        assert not (await instance.call_tool("step", {"how": "nothing"}, timeout_s=5.0)).is_error


async def test_an_environment_that_raises_is_reported_to_the_policy(odd: str) -> None:
    async with instance_at(odd) as instance:
        result = await instance.call_tool("step", {"how": "raise"}, timeout_s=5.0)
        assert (result.is_error, result.parts) == (True, (Text("it broke"),))


async def test_a_call_that_is_given_up_ends_the_session(odd: str) -> None:
    """Otherwise the answer would be taken for that of the next call."""
    async with instance_at(odd) as instance:
        call = asyncio.create_task(instance.call_tool("step", {"how": "wait"}, timeout_s=5.0))
        await asyncio.sleep(0.05)
        with pytest.raises(BackendError, match="in flight") as busy:
            await instance.call_tool("step", {"how": "nothing"}, timeout_s=5.0)
        assert busy.value.delivered is False
        call.cancel()
        await asyncio.wait({call})
        with pytest.raises(BackendError, match="given up") as caught:
            await instance.call_tool("step", {"how": "nothing"}, timeout_s=5.0)
        assert (caught.value.lost, caught.value.delivered) == (True, False)
        execution = await grade(instance)
        assert execution is not None and execution.instance_lost


async def test_a_message_that_is_too_big_ends_the_session_and_names_the_setting(odd: str) -> None:
    async with instance_at(odd, max_answer_bytes=2**16) as instance:
        with pytest.raises(BackendError, match="max_answer_bytes") as caught:
            await instance.call_tool("step", {"how": "big"}, timeout_s=5.0)
        assert (caught.value.lost, caught.value.delivered) == (True, None)


async def test_a_full_server_is_waited_for(odd: str) -> None:
    config = EnvGatewayConfig.model_validate(
        {"backend": "openenv", "backends": {"openenv": {"url": odd}}}
    )
    async with (
        instance_at(odd),
        backend_at(odd) as backend,
        grading_gateway({"openenv": backend}, config) as gateway,
    ):
        first = await opened(gateway, open_spec(0, task=json.dumps(TASK)))
        with pytest.raises(BackendError, match="throttled") as caught:
            await backend.provision_instance(provision(), timeout_s=5.0)
        assert caught.value.delivered is False and not caught.value.invalid
        opening = asyncio.create_task(opened(gateway, open_spec(1, task=json.dumps(TASK))))
        await asyncio.sleep(0.1)
        assert not opening.done()
        gateway.close(first.episode.episode_id)
        assert (await opening).episode.state is EpisodeState.READY


async def test_a_task_that_reset_refuses_fails_the_open_without_waiting(odd: str) -> None:
    config = EnvGatewayConfig.model_validate(
        {"backend": "openenv", "backends": {"openenv": {"url": odd}}}
    )
    async with (
        backend_at(odd) as backend,
        grading_gateway({"openenv": backend}, config) as gateway,
        asyncio.timeout(5.0),
    ):
        spec = open_spec(task=json.dumps({**TASK, "key": "refused"}))
        session, entered = await states(gateway, spec)
        assert entered[-1] is EpisodeState.FAILED
        assert "there is no such task" in (session.failure or "")


async def test_what_serves_no_openenv_is_named(odd: str) -> None:
    async with backend_at(f"{odd}/elsewhere", actions="tools") as backend:
        with pytest.raises(BackendError, match=r"HTTP 40[34] instead of opening") as caught:
            await backend.provision_instance(provision(), timeout_s=5.0)
        assert caught.value.invalid


async def test_there_is_no_database_to_query(odd: str) -> None:
    async with instance_at(odd) as instance:
        with pytest.raises(QueryError):
            await instance.query_database("current", "SELECT 1", (), timeout_s=5.0)
        assert await instance.snapshot_database("seed", timeout_s=5.0) is None


async def test_the_apps_of_one_supervised_server_answer_as_they_do_embedded() -> None:
    """The client sends the key that the server was started with and requires."""
    command = (sys.executable, "-m", "flotilla_environments.serve", "--openenv")
    backend = build_openenv_backend(OpenEnvConfig(command=command, path="/{env_key}"), max_calls=4)
    for env_key in ENV_KEYS:
        raw = make_task(env_key, "train", 1)
        task = parse_task(json.dumps(raw))
        instance = await backend.provision_instance(
            ProvisionRequest("run.gw.1-1", task, 60.0), timeout_s=20.0
        )
        app = open_instance(env_key, task.data_key)
        assert await instance.list_tools(timeout_s=5.0) == [
            Tool(x.name, x.description, json.dumps(x.parameters), x.read_only, x.idempotent)
            for x in app.tools()
        ]
        for name, arguments in plan_calls(raw):
            answer = await instance.call_tool(name, arguments, timeout_s=5.0)
            assert answer == CallResult((Text(json.dumps(app.call(name, arguments))),))
        verdict = run_verifier(raw["verifier_func"], app, "")
        execution = await instance.grade_submission(Submission(task, "", None), timeout_s=5.0)
        assert execution == Execution(result=1.0, report=CheckReport(tuple(verdict.passed), ()))
    await backend.close()


def test_a_task_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task_fields\.split: a task has no field 'spilt'"):
        OpenEnvConfig(url="http://localhost", task_fields={"split": "spilt"})
