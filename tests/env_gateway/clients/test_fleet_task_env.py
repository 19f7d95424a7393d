"""The gateway's client as a replacement of FleetTaskEnv."""

import json
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_common.wire import enums
from flotilla_env_gateway.ports import CallResult, CheckReport, Execution, Media, Text, Tool
from tests.env_gateway.clients.fleet_task_envs import Here, observation


def test_an_episode_is_reported_in_the_recorded_shapes(here: Here) -> None:
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
        reported, reward, done, info = env.step(action)
    result = {"status": "submitted", "message": "Answer recorded. Ending session."}
    assert reported["observation"] == result
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
        reported, reward, done, info = env.step({"tool": "add"})
        assert reported["observation"] == info["tool_result"] == {"error": "no such room"}
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
def test_a_call_that_is_not_executed_is_an_error_without_a_result_and_the_episode_continues(
    here: Here, action: dict[str, Any], message: str
) -> None:
    with here.env() as env:
        env.reset()
        reported, _, done, info = env.step(action)
        assert message in info["tool_error"]
        assert reported["observation"] == {"error": info["tool_error"]}
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
    monkeypatch.setattr("flotilla_env_gateway.grading.grader._BASE_S", 0.001)
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


RETURNED = CheckReport(("a", "b", "c"), ("d",))


@pytest.mark.parametrize(
    ("report", "partial", "reward"),
    [(RETURNED, False, 0.0), (RETURNED, True, 0.75), (None, True, 0.0)],
)
def test_the_share_of_returned_checks_replaces_a_zero_on_request(
    here: Here, report: CheckReport | None, partial: bool, reward: float
) -> None:
    stdout = ">>> SUCCESS_ACCUMULATOR >>>\n['a']\n<<< SUCCESS_ACCUMULATOR <<<"
    here.grader.executions.append(Execution(result=0, report=report, stdout=stdout))
    with here.env(partial_reward=partial) as env:
        env.reset()
        assert env.step({"done": True})[1] == reward
    assert env.verifier_stdout == stdout


def test_the_conversation_reaches_verifiers_that_take_it(here: Here) -> None:
    code = "def verify(env, conversation=None):\n    return 1\n"
    with here.env(task={"verifier_code": code}) as env:
        env.reset()
        env.conversation_messages = [{"role": "user", "content": "é" * 10}] * 3
        env.step({"done": True})
    conversation = here.grader.seen[-1].arguments["conversation"] or ""
    assert json.loads(conversation) == env.conversation_messages


def test_a_gateway_newer_than_the_client_is_understood_as_far_as_it_goes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(enums.TOOL_OUTCOMES._twins, ToolOutcome.BAD_TOOL, 99)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(enums.NO_GRADE_REASONS._twins, NoGradeReason.NO_VERIFIER, 99)  # pyright: ignore[reportPrivateUsage]
    with here.env(task={"verifier_code": None}) as env:
        env.reset()
        assert env.step({"tool": "nowhere"})[3]["tool_error"] == "unknown tool 'nowhere'"
        assert env.step({"done": True})[1] is None
    assert (env.verifier_error or "").startswith("unknown no_grade_reason 99")
