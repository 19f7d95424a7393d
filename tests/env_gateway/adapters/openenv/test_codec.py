"""OpenEnv's protocol against servers that violate it."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.tasks.task_format import parse_task
from flotilla_common.text.parsing import TextLimits
from flotilla_env_gateway.adapters.openenv import codec
from flotilla_env_gateway.adapters.openenv.instance import OpenEnvInstance
from flotilla_env_gateway.adapters.openenv.wire import OpenEnvChannel, OpenEnvError, open_channel
from flotilla_env_gateway.config.openenv import OpenEnvConfig
from flotilla_env_gateway.ports import BackendError, CheckReport, Media, Text
from flotilla_env_gateway.verify.check_report import Returned
from tests.support.examples import examples
from tests.support.fake_gateway import task_json
from tests.support.http_server import serving_app
from tests.support.waiting import until

OBSERVED = ("observation", "metadata", "reward", "done", "error", "error_type", "stdout")
LISTED = ("tools", "name", "input_schema", "annotations", "properties", "type", "enum")
CALLED = ("tool_name", "result", "content", "resource", "data")
NAMES = st.sampled_from((*OBSERVED, *LISTED, *CALLED))
Script = Callable[[web.WebSocketResponse], Awaitable[None]]
OBSERVATION = {"type": "observation", "data": {"observation": {"n": 1}, "reward": None}}


@asynccontextmanager
async def channel_to(
    script: Script, *, ping_interval_s: float = 20.0, autoping: bool = True
) -> AsyncGenerator[OpenEnvChannel]:
    """A session with a server that follows the script."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=autoping)
        await socket.prepare(request)
        await script(socket)
        return socket

    app = web.Application()
    app.router.add_get("/ws", handle)
    async with serving_app(app) as url, aiohttp.ClientSession() as http:
        channel = await open_channel(
            http,
            url,
            timeout_s=5.0,
            ping_interval_s=ping_interval_s,
            limits=TextLimits(bytes=2**20, values=2**16),
        )
        try:
            yield channel
        finally:
            await channel.close(timeout_s=1.0)


def answering(*messages: Any) -> Script:
    """One message for each request, and the end of the session after the last."""

    async def script(socket: web.WebSocketResponse) -> None:
        for message in messages:
            if (await socket.receive()).type is not aiohttp.WSMsgType.TEXT:
                return
            text = message if isinstance(message, str) else json.dumps(message)
            await socket.send_str(text)

    return script


async def silent(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        continue


def refusal(code: str, **data: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "no", "code": code, **data}}


async def failure(channel: OpenEnvChannel, timeout_s: float = 5.0) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await channel.send_request("step", {}, timeout_s=timeout_s)
    return caught.value


async def test_a_request_is_answered_and_the_end_is_known_before_the_next() -> None:
    async with channel_to(answering(OBSERVATION)) as channel:
        assert await channel.send_request("reset", {}, timeout_s=5.0) == OBSERVATION["data"]
        await until(lambda: not channel.is_open, 5.0)
        error = await failure(channel)
        assert (error.lost, error.delivered) == (True, False)


@pytest.mark.parametrize("done", [False, True])
async def test_a_session_that_ends_before_its_episode_shows_it_before_any_request(
    done: bool,
) -> None:
    task = parse_task(task_json())
    config = OpenEnvConfig(url="http://127.0.0.1:1")
    async with channel_to(answering(OBSERVATION)) as channel:
        start: dict[str, Any] = {"observation": {"n": 1}, "done": done}
        backend: Any = None
        instance = OpenEnvInstance(backend, config, channel, task, {}, start, "one")
        assert instance.end_reason is None
        await channel.send_request("reset", {}, timeout_s=5.0)
        await until(lambda: not channel.is_open)
        # One that is done has its rewards.
        assert (instance.end_reason is None) == done


@pytest.mark.parametrize(
    ("code", "delivered", "lost", "invalid"),
    [
        ("CAPACITY_REACHED", False, False, False),
        ("FACTORY_ERROR", False, False, False),
        ("VALIDATION_ERROR", False, False, True),
        ("UNKNOWN_TYPE", False, False, True),
        ("EXECUTION_ERROR", None, False, False),
        ("SESSION_ERROR", None, True, False),
        ("SOMETHING_NEW", None, False, False),
    ],
)
async def test_what_an_error_of_the_server_means(
    code: str, delivered: bool | None, lost: bool, invalid: bool
) -> None:
    async with channel_to(answering(refusal(code), OBSERVATION)) as channel:
        error = await failure(channel)
        assert isinstance(error, OpenEnvError) and error.code == code
        assert (error.delivered, error.lost, error.invalid) == (delivered, lost, invalid)


async def test_a_refusal_before_any_request_is_the_answer_to_the_first_request() -> None:
    async def full(socket: web.WebSocketResponse) -> None:
        await socket.send_json(refusal("CAPACITY_REACHED", active_sessions=1, max_sessions=1))

    async with channel_to(full) as channel:
        await asyncio.sleep(0.05)
        error = await failure(channel)
        assert (error.kind, error.delivered, error.lost) == ("throttled", False, False)
        assert error.retry_after_s


async def test_what_does_not_validate_is_named() -> None:
    errors = [{"loc": ["how"], "msg": "Field required"}, {"loc": [], "msg": "Bad"}]
    async with channel_to(answering(refusal("VALIDATION_ERROR", errors=errors))) as channel:
        assert "how: Field required; arguments: Bad" in str(await failure(channel))


@pytest.mark.parametrize(
    "text",
    ["no JSON", "[" * 100_000, "[]", '{"data": {}}', '{"type": "error", "data": 1}'],
    ids=["text", "deep", "list", "untyped", "no object"],
)
async def test_an_answer_that_is_not_of_the_protocol_ends_the_session(text: str) -> None:
    async with channel_to(answering(text, OBSERVATION)) as channel:
        error = await failure(channel)
        assert (error.lost, error.delivered) == (True, None)
        assert re.search("not of the protocol|a message is too large", str(error))


async def test_an_answer_to_nothing_ends_the_session() -> None:
    async def twice(socket: web.WebSocketResponse) -> None:
        await answering(OBSERVATION)(socket)
        await socket.send_json(OBSERVATION)
        await silent(socket)

    async with channel_to(twice) as channel:
        await channel.send_request("step", {}, timeout_s=5.0)
        await asyncio.sleep(0.05)
        error = await failure(channel)
        assert error.lost and "does not answer a request" in str(error)


async def test_a_request_that_is_not_answered_costs_its_time_and_the_session() -> None:
    async with channel_to(silent) as channel:
        error = await failure(channel, timeout_s=0.05)
        assert (error.kind, error.delivered, error.lost) == ("timeout", None, False)
        assert (await failure(channel)).lost


async def test_a_connection_that_died_in_silence_is_noticed() -> None:
    """Nothing comes back from a host that has vanished, not even a refusal."""
    async with channel_to(silent, ping_interval_s=0.1, autoping=False) as channel:
        error = await failure(channel)
        assert (error.lost, error.delivered) == (True, None)


async def test_closing_ends_what_is_in_flight() -> None:
    async with channel_to(silent) as channel:
        requests = asyncio.create_task(failure(channel))
        await asyncio.sleep(0.01)
        await channel.close(timeout_s=0.1)
        assert (await requests).lost


def step(**observation: Any) -> dict[str, Any]:
    return {"observation": observation, "reward": 0.5, "done": False}


@pytest.mark.parametrize("kind", ["timeout", "transport_error"])
def test_a_tool_that_may_still_run_has_an_unknown_outcome(kind: str) -> None:
    failed = {"error_type": kind, "message": "gave up"}
    with pytest.raises(BackendError, match="gave up") as caught:
        codec.parse_call_result(step(tool_name="t", result=None, error=failed), ())
    assert caught.value.delivered is None


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ([1], "[1]"),
        (None, "null"),
        ({"structured_content": 1, "content": []}, "1"),
    ],
)
def test_results_are_shown_as_text(result: Any, text: str) -> None:
    shown = codec.parse_call_result(step(tool_name="t", result=result, error=None), ())
    assert (shown.parts, shown.reward, shown.is_error) == ((Text(text),), 0.5, False)


def test_images_are_known_in_either_spelling_and_as_data_urls() -> None:
    picture = "iVBORw0KGgo="
    content = [{"type": "image", "data": picture, "mime_type": "image/png"}]
    listed = codec.parse_call_result(
        step(tool_name="t", result={"content": content}, error=None), ()
    )
    shown = codec.parse_observation(
        step(a=f"data:image/png;base64,{picture}", b=picture, c="data:image/png;base64,?", d=1),
        None,
        ("b",),
    )
    assert [type(part) for part in shown] == [Text, Media, Media, Text]
    pictures = [part for part in (*listed.parts, *shown) if isinstance(part, Media)]
    assert {part.mime for part in pictures} == {"image/png"}
    assert len({part.sha256 for part in pictures}) == 1
    assert shown[0] == Text('{"d": 1}')


def test_only_the_fields_that_were_chosen_are_shown() -> None:
    data = step(prompt="Do it.", secret=1, metadata={})
    assert codec.parse_observation(data, ["prompt"], ()) == (Text('{"prompt": "Do it."}'),)
    assert codec.parse_observation(data, [], ()) == ()
    assert codec.parse_observation(step(metadata={}), None, ()) == ()


@pytest.mark.parametrize("reward", ["1", float("nan"), float("inf"), [1], 10**400])
def test_what_is_no_finite_number_is_shown_as_no_reward(reward: Any) -> None:
    """And kept as one that no grade can be made of: an earlier reward must not stand in for it."""
    data = {**step(tool_name="t", result=1, error=None), "reward": reward}
    assert codec.parse_call_result(data, ()).reward is None
    kept = codec.parse_reward(data)
    assert kept is not None and not math.isfinite(kept)
    assert codec.parse_reward({"reward": None}) is codec.parse_reward({}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(NAMES, value, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.dictionaries(NAMES, JSON, max_size=4))
def test_whatever_a_server_answers_is_a_result_or_a_precise_failure(data: dict[str, Any]) -> None:
    codec.takes_tool_calls(data)
    codec.make_step_tool("act", data)
    for read in (
        partial(codec.parse_call_result, data, ("result",)),
        partial(codec.parse_observation, data, None, ("result",)),
        partial(codec.parse_tools, data, ()),
        partial(codec.parse_stdout, data),
    ):
        with suppress(BackendError):
            read()


def test_an_environment_without_tools_gives_the_reason() -> None:
    data = {"observation": {"tools": []}, "metadata": {"error": "no server"}}
    with pytest.raises(BackendError, match="lists no tools: no server"):
        codec.parse_tools(data, ())
    with pytest.raises(BackendError, match="holds no observation"):
        codec.parse_tools({"observation": None}, ())


@pytest.mark.parametrize(
    ("action", "calls"),
    [
        ({"properties": {"type": {"const": "call_tool"}, "tool_name": {}}}, True),
        ({"properties": {"type": {"enum": ["list_tools"]}}}, True),
        ({"properties": {"metadata": {}}}, True),
        ({"properties": {"message": {"type": "string"}}}, False),
        ({"properties": {"type": {"type": "string"}}}, False),
    ],
)
def test_a_schema_marks_tool_calls_among_all_actions(action: dict[str, Any], calls: bool) -> None:
    assert codec.takes_tool_calls(action) is calls


def test_the_tool_of_an_action_leaves_out_what_no_policy_writes() -> None:
    action = {"properties": {"metadata": {}, "message": {}}, "required": ["message"]}
    tool = codec.make_step_tool("act", action)
    assert json.loads(tool.input_schema_json) == {
        "type": "object",
        "properties": {"message": {}},
        "required": ["message"],
    }
    assert re.fullmatch(r"\w+\.", tool.description)


def test_checks_and_named_rewards_behind_a_reward_are_in_its_metadata() -> None:
    behind = {"passed": ["a"], "failed": [], "rewards": {"style": 0.5}}
    assert codec.parse_report(step(metadata=behind)) == Returned(
        None, CheckReport(("a",), ()), {"style": 0.5}
    )
    assert codec.parse_report(step(metadata={"rewards": {"style": 1}})).rewards == {"style": 1}
    assert codec.parse_report(step(metadata={})) == Returned(None)
