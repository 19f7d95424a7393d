"""Any answer of an MCP server becomes an answer that can be sent, or a fault of the server."""

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.http_client import HttpError
from flotilla_env_gateway.adapters.mcp import wire as mcp_wire
from flotilla_env_gateway.adapters.mcp.transport import parse_message
from flotilla_env_gateway.api import codec
from flotilla_env_gateway.episodes.episode_session import MediaStore
from flotilla_env_gateway.ports import BackendError, CallAnswer, Media, Text
from tests.env_gateway.adapters.mcp.test_session import answer, failing, session_with
from tests.support.examples import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PART = st.dictionaries(
    st.sampled_from(["type", "text", "data", "mimeType", "resource", "uri", "blob"]), JSON
)
RESULT = st.fixed_dictionaries(
    {},
    optional={"content": JSON | st.lists(PART | JSON), "structuredContent": JSON, "isError": JSON},
)


@given(result=RESULT)
@settings(max_examples=examples(300), deadline=None)
def test_any_result_can_be_sent_or_is_a_fault_of_the_servers(result: dict[str, Any]) -> None:
    try:
        reported = mcp_wire.parse_call_result(result)
    except BackendError as error:
        assert (error.kind, error.delivered) == ("protocol", None)
    else:
        parts = asyncio.run(MediaStore(2**20).store_large_parts(reported.parts))
        codec.encode_answer(CallAnswer(ToolOutcome.OK, parts), replayed=False).SerializeToString()


@given(result=st.dictionaries(st.just("tools"), JSON | st.lists(PART | JSON)))
@settings(max_examples=examples(200), deadline=None)
def test_any_list_of_tools_is_read_or_a_fault_of_the_servers(result: dict[str, Any]) -> None:
    try:
        mcp_wire.parse_tools(result)
    except BackendError as error:
        assert error.kind == "protocol"


@given(message=JSON | st.dictionaries(st.sampled_from(["result", "error", "id", "method"]), JSON))
@settings(max_examples=examples(200), deadline=None)
def test_any_message_is_one_of_json_rpc_or_none_or_a_fault_of_the_servers(message: Any) -> None:
    try:
        parsed = parse_message(message)
    except BackendError as error:
        assert (error.kind, error.delivered) == ("protocol", None)
    else:
        assert parsed is None or parsed.jsonrpc == "2.0"


Respond = Callable[[dict[str, Any]], web.Response]


def _responding(respond: Respond) -> Any:
    async def handle(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return respond(message)

    return handle


@pytest.mark.parametrize(
    "body",
    [
        *("", "null", "[]", "5", '"text"', "{}]", "\ufeff{}"),
        '{"id": 2, "result": [1]}',
        '{"id": 2, "error": "no"}',
        '{"id": 2, "result": {"content": 7}}',
        '{"id": 2, "result": {"content": [{"type": "text", "text": 5}]}}',
        '{"id": 77, "result": {"content": [{"type": "text", "text": "of another call"}]}}',
    ],
    ids=range(12),
)
async def test_an_answer_that_is_none_leaves_it_open_whether_the_call_was_executed(
    body: str,
) -> None:
    reply = _responding(lambda _: web.Response(text=body, content_type="application/json"))
    error = await failing(reply)
    assert (error.kind, error.delivered, error.lost) == ("protocol", None, False)


@pytest.mark.parametrize("body", ["[" * 100_000, "[" + "[]," * 2**18 + "1]", " " * 2**20 + " {}"])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_answer_of_too_much_is_refused_and_not_requested_again(
    body: str, kind: str
) -> None:
    text = body if kind == "application/json" else f"data: {body}\n\n"
    reply = _responding(lambda _: web.Response(text=text, content_type=kind))
    async with session_with(reply) as (session, methods):
        with pytest.raises(BackendError) as caught:
            await session.list_tools(10.0)
        error = caught.value
        assert (error.kind, error.delivered, error.invalid) == ("too_large", None, True)
        assert "max_answer_values of the backend" in str(error)
        assert (await session.call_tool("t", {}, 10.0)).is_error
    assert methods.count("tools/call") == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_an_answer_that_unpacks_to_gigabytes_is_given_up_at_the_limit(encoding: str) -> None:
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    packed = packer.compress(b" " * 2**28) + packer.flush()
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    began = time.process_time()
    reply = _responding(lambda _: web.Response(body=packed, headers=headers))
    async with session_with(reply) as (session, _):
        assert "too large" in str(await session.call_tool("t", {}, 10.0))
    assert time.process_time() - began < 1.0


async def test_a_stream_without_an_end_ends_at_the_deadline() -> None:
    async def drip(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        event = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress"})
        async for _ in _ticks():
            await stream.write(f": a comment\ndata: {event}\n\n".encode())
        return stream

    error = await failing(drip, timeout_s=1.0)
    assert (error.kind, error.delivered) == ("timeout", None)


async def _ticks() -> AsyncIterator[None]:
    while True:
        yield
        await asyncio.sleep(0.01)


async def test_a_line_of_megabytes_in_a_stream_is_read_in_one_piece() -> None:
    text = "x" * (8 * 2**20)

    def reply(message: dict[str, Any]) -> web.Response:
        result = {"content": [{"type": "text", "text": text}]}
        event = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return web.Response(text=f"data: {event}\r\n\r\n", content_type="text/event-stream")

    async with session_with(_responding(reply), max_bytes=2**24) as (session, _):
        assert (await session.call_tool("t", {}, 5.0)).parts == (Text(text),)


async def test_400_tools_with_schemas_that_refer_to_themselves_are_listed() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    tools = [{"name": f"t{i}", "inputSchema": schema} for i in range(400)]
    async with session_with(_responding(lambda m: answer(m, {"tools": tools}))) as (session, _):
        listed = await session.list_tools(5.0)
    assert [tool.name for tool in listed] == [f"t{i}" for i in range(400)]
    assert json.loads(listed[0].input_schema_json) == schema


def test_an_image_that_is_none_is_passed_on_as_what_came() -> None:
    (none, lies) = mcp_wire.parse_parts(
        {
            "content": [
                {"type": "image", "data": "not base64!", "mimeType": "image/png"},
                {"type": "image", "data": "bGllcw==", "mimeType": "image/png"},
            ]
        }
    )
    assert none == Text("(a part of type image/png that is not base64)")
    assert isinstance(lies, Media) and (lies.data, lies.width) == (b"lies", 0)


async def test_of_an_error_without_an_end_only_the_beginning_is_read() -> None:
    async def failing_for_ever(request: web.Request, _: Any) -> web.StreamResponse:
        answer = web.StreamResponse(status=500)
        await answer.prepare(request)
        for _ in range(2000):
            await answer.write(b"x" * 2**16)
            await asyncio.sleep(0.001)
        return answer

    async with session_with(failing_for_ever) as (session, _):
        with pytest.raises(HttpError) as caught:
            await session.list_tools(1.0)
    assert (caught.value.status, len(caught.value.body)) == (500, 4000)
