"""Clients of FleetTaskEnv's shape come and go, block, give up and forget: nothing stays open."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_address
from flotilla_env_gateway.clients.connection import GatewayError
from flotilla_env_gateway.clients.fleet_task_env import FleetTaskEnv
from flotilla_env_gateway.ports import BackendError
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from tests.env_gateway.clients.fleet_task_envs import TASK, Here, observation
from tests.support.threaded_gateway import TOKEN, served
from tests.support.waiting import until, wait_until


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


def test_a_reset_begins_again_on_another_instance(here: Here) -> None:
    with here.env() as env:
        env.reset()
        first = set(here.backend.running)
        assert env.step({"tool": "add"})[0]["observation"] == 1
        assert env.reset() == observation(0)
        assert not first & set(here.backend.running)
        assert env.step({"tool": "add"})[0]["observation"] == 1
        assert env.tool_errors_list == []


def test_an_environment_that_cannot_be_had_is_reported_and_can_be_tried_again(here: Here) -> None:
    here.backend.fail_at(
        "provision", BackendError("quota", "all taken", delivered=False, lost=True)
    )
    with here.env() as env:
        with pytest.raises(GatewayError, match="all taken"):
            env.reset()
        assert env.reset() == observation(0)


@pytest.mark.parametrize(
    ("task", "message"),
    [({"env_key": "elsewhere"}, "UNKNOWN_ENVIRONMENT"), ({"prompt": ""}, "prompt is missing")],
)
def test_a_task_that_is_refused_is_reported(here: Here, task: dict[str, Any], message: str) -> None:
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
    reported, *_ = await env.step_async({"tool": "add"})
    assert (reported["step"], reported["observation"]) == (2, 2)
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


SDK_TASK = {"key": "task-2", "prompt": "p", "env_id": "fake"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"tasks": [TASK, SDK_TASK]}),
        json.dumps([TASK, SDK_TASK]),
        f"{json.dumps(TASK)}\n{json.dumps(SDK_TASK)}\n",
    ],
)
def test_tasks_are_read_from_a_file_of_any_form_in_both_vocabularies(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(text)
    keywords = {"gateway": "127.0.0.1:1", "token": TOKEN}
    assert FleetTaskEnv.from_json_file(path, "task-2", **keywords).task == SDK_TASK
    envs = FleetTaskEnv.from_json_file_all(path, max_steps=3, **keywords)
    assert [env.task_key for env in envs] == ["task-1", "task-2"]
    assert envs[0].max_steps == 3
    with pytest.raises(ValueError, match="'task-3' is not in"):
        FleetTaskEnv.from_json_file(path, "task-3", **keywords)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a JSON array of tasks"):
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
    address = free_address()
    spec = tmp_path / "spec.json"
    policy = {"model": "none", "dtype": "float32", "max_model_len": 512}
    section = {"backend": "embedded"}
    spec.write_text(
        json.dumps({"name": "alone", "seed": 0, "policy": policy, "env_gateway": section})
    )
    monkeypatch.setenv("FLOTILLA_GATEWAY", address)
    monkeypatch.setenv("FLOTILLA_TOKEN", TOKEN)
    command = [sys.executable, "-m", "flotilla_env_gateway", "--config", str(spec)]
    command += ["--listen", address, "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            task = make_task("booking", "train", 0)
            with FleetTaskEnv(task) as solved, FleetTaskEnv(task) as idle:
                assert solved.reset()["task_key"] == task["key"]
                idle.reset()
                for name, arguments in plan_calls(task):
                    assert "tool_error" not in solved.step({"tool": name, "params": arguments})[3]
                assert solved.step({"done": True})[1] == 1.0, solved.verifier_stdout
            assert idle.final_reward == 0.0
        finally:
            process.terminate()
    assert process.returncode == 0
