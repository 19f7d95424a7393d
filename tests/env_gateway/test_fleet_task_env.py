"""Programs written for FleetTaskEnv run against the gateway: what it told them, they are told."""

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from environments.oracle import plan
from environments.tasks import make_task
from services.env_gateway import codec
from services.env_gateway.adapters.fake import FakeBackend, FakeGrader
from services.env_gateway.clients.connection import GatewayError
from services.env_gateway.clients.fleet_task_env import FleetTaskEnv, make_fleet_task_env
from services.env_gateway.grading import Reason
from services.env_gateway.ports import BackendError, CallResult, Execution, Media, Text, Tool
from services.env_gateway.session import Outcome
from tests.env_gateway.support import VERIFIER, until
from tests.env_gateway.threaded import TOKEN, Served, served, wait_until

TASK = {
    "task_key": "task-1",
    "prompt": "Count to one.",
    "env_key": "fake",
    "env_version": "v1",
    "verifier_code": VERIFIER,
    "task_modality": "tool_use",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    for name, description in (("look", "Reads the counter."), ("add", "Adds to the counter."))
]


@dataclass(slots=True)
class Here:
    """A gateway, and clients of it."""

    served: Served

    def env(self, **keywords: Any) -> FleetTaskEnv:
        task = {**TASK, **keywords.pop("task", {})}
        address = self.served.address
        return make_fleet_task_env(task, gateway=address, token=TOKEN, **keywords)

    @property
    def backend(self) -> FakeBackend:
        return self.served.backend

    @property
    def grader(self) -> FakeGrader:
        return self.served.grader

    def wait_until_closed(self) -> None:
        """Closing goes on in the background."""
        wait_until(lambda: not self.backend.running)


@pytest.fixture
def here() -> Iterator[Here]:
    with served() as gateway:
        here = Here(gateway)
        yield here
        here.wait_until_closed()


def observation(step: int, result: Any = None, **changes: Any) -> dict[str, Any]:
    told = {
        "prompt": "Count to one.",
        "observation": {} if result is None else result,
        "step": step,
        "task_key": "task-1",
        "modality": "tool_use",
        "tools": TOOLS,
    }
    return told | changes


def test_an_episode_is_told_in_the_recorded_shapes(here: Here) -> None:
    with here.env() as env:
        assert env.reset() == observation(0)
        assert env.step({"tool": "add", "params": {"by": 1}}) == (
            observation(1, 1),
            0.0,
            False,
            {"step": 1, "tool_result": 1, "done_reason": None},
        )
        assert env.step({"done": True}) == (
            observation(2),
            1.0,
            True,
            {"step": 2, "done_reason": "agent_done", "reward_computed": True},
        )
        with pytest.raises(RuntimeError, match="Episode is done"):
            env.step({"tool": "look"})
        assert env.final_reward == 1.0


async def test_the_methods_without_async_work_inside_an_event_loop(here: Here) -> None:
    with here.env() as env:
        assert env.reset()["step"] == 0
        assert env.step({"tool": "look"})[3]["tool_result"] == 0


async def test_the_methods_with_async_do_the_same(here: Here) -> None:
    env = here.env()
    assert await env.reset_async(seed=3) == observation(0)
    step = await env.step_async({"tool": "look", "params": None, "done": True})
    assert step[1:3] == (1.0, True)
    await env.close_async()
    await env.close_async()


async def test_many_episodes_of_one_process_share_a_connection(here: Here) -> None:
    async def episode() -> float | None:
        env = here.env()
        await env.reset_async()
        await env.step_async({"tool": "add"})
        await env.close_async()
        return env.final_reward

    before = threading.active_count()
    assert await asyncio.gather(*(episode() for _ in range(20))) == [1.0] * 20
    assert threading.active_count() <= before


def test_the_last_step_allowed_ends_the_episode(here: Here) -> None:
    with here.env(max_steps=2) as env:
        env.reset()
        assert env.step({"tool": "look"})[2] is False
        _, reward, done, info = env.step({"tool": "look"})
        assert (reward, done, info["done_reason"]) == (1.0, True, "max_steps")


def test_an_answer_is_submitted_with_the_grade_and_ends_the_episode(here: Here) -> None:
    task = {"prompt": "Count, then call submit_final_answer."}
    with here.env(task=task) as env:
        offered = [tool["function"]["name"] for tool in env.reset()["tools"]]
        assert offered == ["look", "add", "submit_final_answer"]
        action = {"tool": "submit_final_answer", "params": {"answer": "42"}}
        told, reward, done, info = env.step(action)
    result = {"status": "submitted", "message": "Answer recorded. Ending session."}
    assert told["observation"] == result
    assert (reward, done) == (1.0, True)
    assert info == {
        "step": 1,
        "tool_result": result,
        "submitted_answer": "42",
        "done_reason": "agent_done",
        "reward_computed": True,
    }
    assert here.grader.seen[-1].arguments == {"final_answer": "42"}


def test_what_a_tool_refuses_is_a_result_and_an_error(here: Here) -> None:
    async def refuse(name: str, arguments: object) -> CallResult:
        return CallResult((Text("no such room"),), is_error=True)

    here.backend.hook = refuse
    with here.env() as env:
        env.reset()
        told, reward, done, info = env.step({"tool": "add"})
        assert told["observation"] == info["tool_result"] == {"error": "no such room"}
        assert (info["tool_error"], reward, done) == ("no such room", 0.0, False)
        assert env.tool_errors_list == ["add(): no such room"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"tool": "nowhere"}, "unknown tool 'nowhere'"),
        ({"tool": "add", "params": {"by": float("nan")}}, "NaN is not a JSON number"),
        ({"tool": "add", "params": {"by": {1}}}, "cannot be sent"),
        ({"tool": "add", "params": {"by": "x" * 2**21}}, "exceed 1048576 bytes"),
        ({"tool": "\ud800"}, "cannot be sent"),
    ],
)
def test_a_call_that_is_not_executed_is_an_error_without_a_result_and_the_episode_goes_on(
    here: Here, action: dict[str, Any], message: str
) -> None:
    with here.env() as env:
        env.reset()
        told, _, done, info = env.step(action)
        assert message in info["tool_error"]
        assert told["observation"] == {"error": info["tool_error"]}
        assert "tool_result" not in info and not done
        assert env.step({"tool": "add"})[0]["observation"] == 1


def test_images_are_openai_parts_with_their_bytes_however_large(here: Here) -> None:
    image = Media(b"\x89PNG" + bytes(200_000), "image/png", b"h" * 32, 200_004)

    async def shoot(name: str, arguments: object) -> CallResult:
        return CallResult((Text("a screen"), image, Text("y" * 100_000)))

    here.backend.hook = shoot
    with here.env() as env:
        env.reset()
        text, large, shot = env.step({"tool": "look"})[0]["observation"]
    assert text == {"type": "text", "text": "a screen"}
    assert large == {"type": "text", "text": "y" * 100_000}
    assert shot["image_url"]["url"].startswith("data:image/png;base64,iVBORw")
    assert len(shot["image_url"]["url"]) > 4 * 200_000 / 3


@pytest.mark.parametrize("shown", [True, False])
def test_a_task_on_a_screen_begins_with_a_screenshot(here: Here, shown: bool) -> None:
    screen = Media(b"\x89PNG", "image/png", b"h" * 32, 4)

    async def shoot(name: str, arguments: object) -> CallResult:
        return CallResult((screen,))

    here.backend.tools = (Tool("computer", "The screen.", '{"type": "object"}'),)
    here.backend.first_observation = (screen,) if shown else ()
    here.backend.hook = shoot
    with here.env(task={"task_modality": "computer_use"}) as env:
        first = env.reset()
    assert env.ttl_seconds == 1800
    assert first["modality"] == "computer_use"
    assert first["initial_screenshot"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    ]


@pytest.mark.parametrize(
    ("execution", "error"),
    [
        (Execution(error="KeyError: 'x'", stdout="half way"), "execution_failed: KeyError"),
        (Execution(result=None), "execution_failed: the verifier returned None"),
        (Execution(result=0, stdout="JUDGE ERROR: busy"), "judge_error: busy"),
        (Execution(timed_out=True), "timeout"),
    ],
)
def test_a_grade_that_is_not_known_is_none(
    here: Here, execution: Execution, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.env_gateway.verdicts._BASE_S", 0.001)
    here.grader.executions.extend([execution] * 4)
    with here.env() as env:
        env.reset()
        _, reward, done, info = env.step({"done": True})
    assert (reward, done, info["reward_computed"]) == (None, True, True)
    assert env.final_reward is None
    assert (env.verifier_error or "").startswith(error)
    assert env.verifier_stdout == (execution.stdout or None)


def test_a_task_without_a_verifier_has_no_reward(here: Here) -> None:
    with here.env(task={"verifier_code": None}) as env:
        env.reset()
        assert env.step({"done": True})[1] is None
    assert env.verifier_error == "no_verifier: the task has no verifier"


@pytest.mark.parametrize(("partial", "reward"), [(False, 0.0), (True, 0.75)])
def test_a_partial_reward_replaces_a_zero_where_it_is_asked_for(
    here: Here, partial: bool, reward: float
) -> None:
    blocks = [("SUCCESS", ["a", "b", "c"]), ("ERROR", ["d"])]
    stdout = "\n".join(
        f">>> {kind}_ACCUMULATOR >>>\n{checks}\n<<< {kind}_ACCUMULATOR <<<"
        for kind, checks in blocks
    )
    here.grader.executions.append(Execution(result=0, stdout=stdout))
    with here.env(partial_reward=partial) as env:
        env.reset()
        assert env.step({"done": True})[1] == reward
    assert env.verifier_stdout == stdout


def test_an_episode_that_was_left_early_is_graded_when_it_is_closed(here: Here) -> None:
    env = here.env()
    env.reset()
    env.step({"tool": "add"})
    assert env.final_reward is None
    env.close()
    assert env.final_reward == 1.0
    here.wait_until_closed()
    with pytest.raises(RuntimeError, match="Episode is done"):
        env.step({"tool": "add"})


def test_the_conversation_reaches_verifiers_that_ask_for_it(here: Here) -> None:
    code = "def verify(env, conversation=None):\n    return 1\n"
    with here.env(task={"verifier_code": code}) as env:
        env.reset()
        env.conversation_messages = [{"role": "user", "content": "é" * 10}] * 3
        env.step({"done": True})
    conversation = here.grader.seen[-1].arguments["conversation"] or ""
    lines = [json.loads(line) for line in conversation.splitlines()]
    assert lines == env.conversation_messages


def test_a_reset_begins_anew_on_another_instance(here: Here) -> None:
    with here.env() as env:
        env.reset()
        first = set(here.backend.running)
        assert env.step({"tool": "add"})[0]["observation"] == 1
        assert env.reset() == observation(0)
        assert not first & set(here.backend.running)
        assert env.step({"tool": "add"})[0]["observation"] == 1
        assert env.tool_errors_list == []


def test_an_environment_that_cannot_be_had_is_said_so_and_can_be_tried_again(here: Here) -> None:
    here.backend.fail("provision", BackendError("quota", "all taken", delivered=False, lost=True))
    with here.env() as env:
        with pytest.raises(GatewayError, match="all taken"):
            env.reset()
        assert env.reset() == observation(0)


@pytest.mark.parametrize(
    ("task", "message"),
    [({"env_key": "elsewhere"}, "UNKNOWN_ENVIRONMENT"), ({"prompt": ""}, "prompt is missing")],
)
def test_a_task_that_is_refused_is_said_so(here: Here, task: dict[str, Any], message: str) -> None:
    with here.env(task=task) as env, pytest.raises(GatewayError, match=message):
        env.reset()


def test_a_step_before_the_first_reset_is_refused(here: Here) -> None:
    with here.env() as env, pytest.raises(RuntimeError, match=r"Call reset\(\) first"):
        env.step({"tool": "look"})


def test_leases_are_renewed_while_the_program_is_busy() -> None:
    with served(lease_ttl_s=0.3) as gateway, Here(gateway).env() as env:
        env.reset()
        threading.Event().wait(1.0)
        assert env.step({"tool": "add"})[0]["observation"] == 1


def test_a_full_queue_is_waited_for() -> None:
    def episode(env: FleetTaskEnv) -> None:
        with env:
            env.reset()

    with served(limits={"max_episodes": 1, "max_waiting": 1}) as gateway:
        here = Here(gateway)
        with here.env() as first:
            first.reset()
            others = [threading.Thread(target=episode, args=(here.env(),)) for _ in range(2)]
            for thread in others:
                thread.start()
            threading.Event().wait(0.1)
            assert gateway.gateway.admission.waiting == 1
        for thread in others:
            thread.join(5.0)
        here.wait_until_closed()
        assert gateway.gateway.opener.created == 3


async def test_a_reset_that_is_given_up_leaves_nothing_open(here: Here) -> None:
    here.backend.delays["list_tools"] = 0.2
    env = here.env()
    resetting = asyncio.create_task(env.reset_async())
    await until(lambda: bool(here.backend.running))
    resetting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resetting
    await env.close_async()
    here.wait_until_closed()


async def test_a_step_that_is_given_up_is_seen_through(here: Here) -> None:
    here.backend.delays["call"] = 0.1
    env = here.env()
    await env.reset_async()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.step_async({"tool": "add"}), 0.02)
    told, *_ = await env.step_async({"tool": "add"})
    assert (told["step"], told["observation"]) == (2, 2)
    await env.close_async()


def test_an_environment_that_is_dropped_is_closed_all_the_same(here: Here) -> None:
    env = here.env()
    env.reset()
    assert here.backend.running
    keep = here.env()
    keep.reset()
    del env
    gc.collect()
    wait_until(lambda: len(here.backend.running) == 1)
    keep.close()


def test_tasks_are_read_from_a_file_in_both_vocabularies(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    sdk = {"key": "task-2", "prompt": "p", "env_id": "fake"}
    path.write_text(json.dumps({"tasks": [TASK, sdk]}))
    keywords = {"gateway": "127.0.0.1:1", "token": TOKEN}
    assert FleetTaskEnv.from_json_file(path, "task-2", **keywords).task == sdk
    envs = FleetTaskEnv.from_json_file_all(path, max_steps=3, **keywords)
    assert [env.task_key for env in envs] == ["task-1", "task-2"]
    assert envs[0].max_steps == 3
    with pytest.raises(ValueError, match="'task-3' is not in"):
        FleetTaskEnv.from_json_file(path, "task-3", **keywords)
    path.write_text("[]")
    with pytest.raises(ValueError, match="must hold"):
        FleetTaskEnv.from_json_file_all(path, **keywords)


def test_where_the_gateway_is_may_come_from_the_environment(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="FLOTILLA_GATEWAY"):
        FleetTaskEnv(TASK, "an-api-key")
    monkeypatch.setenv("FLOTILLA_GATEWAY", here.served.address)
    with pytest.raises(ValueError, match="FLOTILLA_TOKEN"):
        FleetTaskEnv(TASK)
    monkeypatch.setenv("FLOTILLA_TOKEN", TOKEN)
    with FleetTaskEnv(TASK) as env:
        assert env.reset()["task_key"] == "task-1"


def test_a_program_uses_a_gateway_that_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: the service's own process, an app of this repository, a real verifier."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spec = tmp_path / "spec.json"
    policy = {"model": "none", "dtype": "float32", "max_model_len": 512}
    section = {"backend": "embedded"}
    spec.write_text(
        json.dumps({"name": "alone", "seed": 0, "policy": policy, "env_gateway": section})
    )
    monkeypatch.setenv("FLOTILLA_GATEWAY", address)
    monkeypatch.setenv("FLOTILLA_TOKEN", TOKEN)
    command = [sys.executable, "-m", "services.env_gateway", "--config", str(spec)]
    command += ["--listen", address, "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            task = make_task("booking", "train", 0)
            with FleetTaskEnv(task) as solved, FleetTaskEnv(task) as idle:
                assert solved.reset()["task_key"] == task["key"]
                idle.reset()
                for name, arguments in plan(task):
                    assert "tool_error" not in solved.step({"tool": name, "params": arguments})[3]
                assert solved.step({"done": True})[1] == 1.0, solved.verifier_stdout
            assert idle.final_reward == 0.0
        finally:
            process.terminate()
    assert process.returncode == 0


def test_a_gateway_newer_than_the_client_is_understood_as_far_as_it_goes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(codec._OUTCOMES, Outcome.BAD_TOOL, 99)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(codec._REASONS, Reason.NO_VERIFIER, 99)  # pyright: ignore[reportPrivateUsage]
    with here.env(task={"verifier_code": None}) as env:
        env.reset()
        assert env.step({"tool": "nowhere"})[3]["tool_error"] == "unknown tool 'nowhere'"
        assert env.step({"done": True})[1] is None
    assert (env.verifier_error or "").startswith("unknown no_grade_reason 99")
