"""Our environments as OpenEnv servers, used by OpenEnv's clients."""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from flotilla_environments.api import ToolError, open_instance
from flotilla_environments.openenv import launch
from flotilla_environments.openenv.episode import SUBMIT, Choice, Episode, describe_task
from flotilla_environments.reference_policies import plan_calls, solve_task
from flotilla_environments.task_generator import SPLITS
from flotilla_environments.tasks import make_task
from tests.environments.test_serve import serving
from tests.support.environment_processes import environment_command
from tests.support.repository import ROOT

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
TASK = make_task("booking", "train", 1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("booking", "--openenv", "--max-instances", "3") as (_, address):
        yield address


async def exchange(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Any = None) -> Any:
    await socket.send_json({"type": kind} | ({} if data is None else {"data": data}))
    return (await socket.receive_json(timeout=5))["data"]


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


async def test_openenvs_own_clients_solve_a_task(url: str) -> None:
    steps = plan_calls(TASK)
    command = [str(PYTHON), str(Path(__file__).with_name("openenv_client.py")), url]
    process = await asyncio.create_subprocess_exec(
        *command, TASK["key"], json.dumps(steps), stdout=subprocess.PIPE
    )
    seen = json.loads((await process.communicate())[0])
    instance = open_instance("booking", TASK["data_id"])
    expected = [instance.call(name, arguments) for name, arguments in steps]
    assert seen["steps"]["prompt"] == TASK["prompt"]
    assert seen["steps"]["steps"] == [
        *([value, None, False] for value in expected),
        [{"ok": True}, 1.0, True],
    ]
    state = seen["steps"]["state"]
    assert (state["step_count"], state["ended"]) == (len(steps) + 1, True)
    specs = [*instance.tools(), SUBMIT]
    assert seen["tools"]["tools"] == {spec.name: spec.parameters for spec in specs}
    assert seen["tools"]["results"] == expected


async def test_each_connection_has_a_session_and_its_place(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        first = await http.ws_connect(f"{url}/ws")
        second = await http.ws_connect(f"{url}/ws")
        for socket in (first, second):
            await exchange(socket, "reset", {"task_key": TASK["key"]})
        name, arguments = plan_calls(TASK)[-1]
        changed = await exchange(first, "step", call(name, arguments))
        assert changed["observation"]["error"] is None
        grades = [
            (await exchange(socket, "step", call(SUBMIT.name, {"answer": ""})))["reward"]
            for socket in (first, second)
        ]
        assert grades == [1.0, 0.0]
        async with http.get(f"{url}/sessions") as answer:
            assert await answer.json() == {"active": 2, "limit": 3}
        await first.close()
        await second.close()


async def test_a_task_that_does_not_exist_is_refused_by_name(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
        error = await exchange(socket, "reset", {"data_id": "nowhere"})
        assert error["code"] == "EXECUTION_ERROR" and "nowhere" in error["message"]
        early = await exchange(socket, "step", call("find_bookings", {}))
        assert "reset starts one" in early["observation"]["error"]["message"]
        tools = await exchange(socket, "step", {"type": "list_tools"})
        assert tools["observation"]["tools"][-1]["name"] == SUBMIT.name


async def test_tasks_are_listed_without_their_solutions(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/booking/splits") as answer:
            assert [split["name"] for split in await answer.json()] == list(SPLITS)
        body = {"split": "train", "start": 1, "stop": 3}
        async with http.post(f"{url}/booking/task_range", json=body) as answer:
            tasks = (await answer.json())["tasks"]
        assert [task["task_key"] for task in tasks] == [
            "booking-train-000001",
            "booking-train-000002",
        ]
        assert tasks[0]["prompt"] == TASK["prompt"]
        async with http.post(f"{url}/booking/task", json={"split": "train", "index": -1}) as answer:
            assert answer.status == 400


async def test_a_server_with_a_token_requires_it() -> None:
    with serving("booking", "--openenv", FLOTILLA_ENV_TOKEN="secret") as (_, address):
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{address}/schema") as answer:
                assert answer.status == 401
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await http.ws_connect(f"{address}/ws")
            assert caught.value.status == 403
            headers = {"authorization": "Bearer secret"}
            async with http.ws_connect(f"{address}/ws", headers=headers) as socket:
                state = await exchange(socket, "state")
                assert state["step_count"] == 0


@pytest.mark.slow
async def test_a_session_that_is_idle_too_long_gives_its_place_back() -> None:
    """The package looks every five seconds at most often; several apps each look by themselves."""
    options = ("booking", "tracker", "--openenv", "--session-timeout", "1")
    with serving(*options) as (_, address):
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{address}/tracker/ws") as ws:
            await exchange(ws, "reset", {"seed": 7})
            await asyncio.sleep(11)
            async with http.get(f"{address}/tracker/sessions") as answer:
                assert (await answer.json())["active"] == 0
            late = await exchange(ws, "step", call("find_issues", {}))
            assert "--session-timeout" in late["message"]


def test_the_task_is_what_was_named_most_exactly() -> None:
    chosen = [
        Choice(data_id="demo-000009", task_key="booking-train-000001", seed=3),
        Choice(task_key="booking-train-000001", split="heldout", index=4, seed=3),
        Choice(split="heldout", index=4, seed=3),
        Choice(index=4),
        Choice(seed=3),
    ]
    assert [choice.data_id_of("booking") for choice in chosen] == [
        "demo-000009",
        "train-000001",
        "heldout-000004",
        "train-000004",
        "train-000003",
    ]
    anything = {Choice().data_id_of("booking") for _ in range(5)}
    assert len(anything) > 1 and all(name.startswith("train-") for name in anything)
    with pytest.raises(ValueError, match="task 'shop-train-000001' is not of this environment"):
        Choice(task_key="shop-train-000001").data_id_of("booking")
    with pytest.raises(ValueError, match="unknown split 'tomorrow'"):
        describe_task("booking", "tomorrow", 0)


@pytest.mark.parametrize(
    ("act", "answer", "result"), [(True, "done", 1), (True, None, 0), (False, "done", 0)]
)
def test_the_verdict_is_the_verifiers(act: bool, answer: str | None, result: int) -> None:
    episode = Episode("booking", Choice(task_key=TASK["key"]))
    if act:
        solve_task(TASK, episode.call)
    assert episode.verdict is None
    episode.call(SUBMIT.name, {"answer": answer})
    assert episode.verdict is not None and episode.verdict.score == result
    assert bool(episode.verdict.failed) == (result == 0)
    with pytest.raises(ToolError, match="the episode has ended"):
        episode.call(SUBMIT.name, {"answer": answer})
    episode.close()


@pytest.mark.parametrize("arguments", [{}, {"answer": 1}, {"answer": "", "more": 1}])
def test_a_malformed_answer_does_not_end_the_episode(arguments: dict[str, Any]) -> None:
    episode = Episode("booking", Choice(task_key=TASK["key"]))
    with pytest.raises(ToolError, match="a string or null"):
        episode.call(SUBMIT.name, arguments)
    assert episode.verdict is None
    episode.close()


def test_without_the_package_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PYTHON", Path("/nowhere/bin/python"))
    with pytest.raises(launch.NotInstalledError, match="make openenv"):
        launch.ensure_openenv([])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["nowhere"], "'nowhere' is not one of"),
        (["arithmetic", "--openenv"], "'arithmetic' is not one of booking, tracker, shop"),
        (["--openenv", "--session-timeout", "0"], "--session-timeout must be more than 0"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options: list[str], error: str) -> None:
    command = environment_command("-m", "flotilla_environments.serve", *options)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert error in ended.stderr
