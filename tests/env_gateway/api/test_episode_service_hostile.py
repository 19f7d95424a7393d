"""Any content of tasks, tool calls, servers and verifiers: the gateway answers with a status of its
own, and its event loop is held for less than 50 ms."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_env_gateway.ports import Execution
from flotilla_env_gateway.verify.protocol import LINE_BYTES, ProtocolError, parse_message
from tests.env_gateway.api.held_loop import held_loops
from tests.env_gateway.api.hostile_gateway import Hostile, hostile_gateway
from tests.env_gateway.api.raw_wire import Refused
from tests.support.fake_gateway import task_json

# Statuses that report a failure of the service itself.
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# Cases are large, and share a gateway.
SUPPRESSED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.filter_too_much,
)
QUICK, LONG = 15, 2_500
UNITS = [
    *("[", "{", '{"a":', "[]", "[],", "{},", '{"":0},', '"a":1,', '"",', "1,", "1e999,", "9" * 99),
    *("-", "\\", '\\"', "\\ud800", '"\\ud800",', "é", "😀", "\n", "\r", "\0", " ", "NaN,", "'a',"),
    *(
        "X=1,Y=1",
        "data:",
        "data: 1\n\n",
        "App a: 1\n",
        "App a: 0 ",
        "JUDGE ERROR: ",
        "(",
        "0x",
        "f",
    ),
]
SCALARS = st.sampled_from(
    [0, 1, -1, 2**63, 10**300, 10**400, 1.5, 1e308, None, True, False, "", "\ud800", "\0", "a" * 9]
)
JSON = st.recursive(
    SCALARS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


class SentText(str):
    """A text that a failing test shows shortened."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{str(self[:80])!r}... of {len(self)} characters"


def bombs(most: int) -> st.SearchStrategy[str]:
    """A repeated unit of up to `most` bytes, closed or not."""
    sizes = st.sampled_from([size for size in (10, 1000, 2**16, most) if size <= most])
    ends = st.sampled_from(["", "1]", "]", "}", '"'])
    starts = st.sampled_from(["", "[", "{", '"', '{"a":'])
    return st.builds(
        lambda start, unit, size, end: SentText(start + unit * (size // len(unit.encode())) + end),
        *(starts, st.sampled_from(UNITS), sizes, ends),
    )


def documents(fields: list[str], most: int) -> st.SearchStrategy[str]:
    """JSON objects with some of the fields, cut and changed ones, and other text."""
    value = JSON | bombs(2**12)
    whole = st.dictionaries(st.sampled_from(fields), value, max_size=6).map(json.dumps)
    cut = st.builds(lambda text, at: text[: at % (len(text) + 1)], whole, st.integers(0, 500))
    grown = st.builds(lambda text, more: text[:-1] + "," + more + "}", whole, bombs(most))
    return (whole | cut | grown | bombs(most) | st.text(max_size=50)).map(SentText)


def sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    with hostile_gateway() as hostile:
        yield hostile


def answered(hostile: Hostile, request: Callable[[], Any]) -> Any:
    """The answer, or the refusal, which is not that the gateway has failed; in time. What holds the
    loop by its nature does so again, which a machine that others use does not."""
    hostile.held.begin()
    answer = attempted(request)
    for _ in range(2):
        if hostile.held.within():
            return answer
        hostile.held.begin()
        answer = attempted(request)
    hostile.held.check()
    return answer


def attempted(request: Callable[[], Any]) -> Any:
    try:
        return request()
    except Refused as refused:
        assert refused.code not in OURS, refused
        return refused


def fuzzed(strategy: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Two tests of one: a few cases, and thousands as a slow one."""

    def decorate(test: Callable[..., None]) -> Any:
        for_all = given(text=strategy)

        @pytest.mark.parametrize("cases", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
        @pytest.mark.timeout(1800)
        def run(hostile: Hostile, cases: int) -> None:
            def one(text: str) -> None:
                test(hostile, text)

            limits = settings(
                max_examples=cases, deadline=None, suppress_health_check=SUPPRESSED, database=None
            )
            limits(for_all(one))()

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate


TASK = [
    *("key", "task_key", "prompt", "env_id", "env_key", "version", "data_id", "data_version"),
    *("env_variables", "verifier_func", "task_modality"),
]


@fuzzed(
    documents(TASK, 2**19)
    | documents(TASK, 2**16).map(lambda text: SentText(task_json(env_variables=text)))
)
def test_any_task_is_opened_or_refused(hostile: Hostile, text: str) -> None:
    answer = answered(hostile, lambda: hostile.open(sendable(text)))
    assert "the gateway failed" not in str(answer)


@fuzzed(documents(["by", "answer", "coordinate", "action"], 2**19))
def test_any_arguments_are_answered(hostile: Hostile, text: str) -> None:
    hostile.server.body = None
    answer = answered(hostile, lambda: hostile.call(sendable(text)))
    assert isinstance(answer, pb.CallToolResponse)
    assert answer.outcome in (pb.TOOL_OUTCOME_OK, pb.TOOL_OUTCOME_BAD_ARGUMENTS)


PART = ["type", "text", "data", "mimeType", "resource", "uri", "blob"]
RESULT = ["content", "isError", "structuredContent", "error", "result", "id", "jsonrpc"]
RESULTS = documents(RESULT, 2**20) | st.lists(documents(PART, 2**18), max_size=3).map(
    lambda parts: SentText(f'{{"content": [{",".join(parts)}]}}')
)


@fuzzed(
    st.tuples(RESULTS, st.booleans(), st.sampled_from([200, 200, 200, 413, 500]), st.booleans())
)
def test_any_answer_of_a_server_is_passed_on_or_a_fault_of_its_own(
    hostile: Hostile, text: tuple[str, bool, int, bool]
) -> None:
    message, whole, hostile.server.status, stream = text
    data = message.encode("utf-8", "surrogatepass")
    hostile.server.body, hostile.server.result = (data, b"{}") if whole else (None, data)
    hostile.server.content_type = "text/event-stream" if stream else "application/json"
    try:
        answer = answered(hostile, hostile.call)
    finally:
        hostile.server.body, hostile.server.result = None, b"{}"
        hostile.server.content_type, hostile.server.status = "application/json", 200
    assert isinstance(answer, pb.CallToolResponse)
    # Only other refusals lose the session, which all cases share.
    assert answer.outcome != pb.TOOL_OUTCOME_SESSION_LOST
    # The kind of errors that no adapter foresaw.
    assert not answer.parts or not answer.parts[0].text.startswith("internal: ")


OPENED = ">>> ERROR_ACCUMULATOR >>>\n{}\n<<< ERROR_ACCUMULATOR <<<"
PRINTED = st.lists(st.text(max_size=20) | bombs(2**18), max_size=3).map("\n".join).map(SentText)
OUTPUT = st.tuples(
    PRINTED
    | PRINTED.map(lambda body: f">>> ERROR_ACCUMULATOR >>>\n{body}\n<<< ERROR_ACCUMULATOR <<<"),
    JSON,
)


@fuzzed(OUTPUT)
def test_any_output_of_a_verifier_is_a_grade_or_none(
    hostile: Hostile, text: tuple[str, Any]
) -> None:
    printed, result = text
    answer = answered(hostile, lambda: hostile.graded(Execution(result=result, stdout=printed)))
    assert isinstance(answer, pb.GradeResponse)
    assert not answer.no_grade.detail.startswith("the gateway failed")


@pytest.mark.parametrize("cases", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_any_line_of_a_sandbox_is_a_message_or_a_breach(cases: int) -> None:
    @given(documents(["done", "query", "db", "args", "call", "snapshot"], LINE_BYTES))
    @settings(max_examples=cases, deadline=None, suppress_health_check=SUPPRESSED)
    def one(text: str) -> None:
        try:
            parse_message(text.encode("utf-8", "surrogatepass"))
        except ProtocolError as error:
            assert str(error)

    one()


def test_a_surrogate_in_an_error_is_reported_for_an_episode_that_cannot_be_opened(
    hostile: Hostile,
) -> None:
    hostile.server.listed = rb'{"id": null, "error": {"code": -32602, "message": "\ud800"}}'
    try:
        answer = answered(hostile, lambda: hostile.open(task_json(env_id="other")))
    finally:
        hostile.server.listed = None
    assert answer.state == pb.EPISODE_STATE_FAILED and answer.detail.endswith("-32602: ?")


MIB = 2**20
TARGETS = {
    "repeated keys": "{" + ",".join(f'"k{n}":1' for n in range(45_000)) + ',"k1":1}',
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "lists": "[" + "[]," * (MIB // 3 - 9) + "1]",
    "objects": "[" + "{}," * (MIB // 3 - 9) + "1]",
    "small keys": "{" + ",".join(f'"{n:x}":0' for n in range(MIB // 10)) + "}",
    "a huge integer": "1" * (MIB - 99),
    "long integers": "[" + ("9" * 4000 + ",") * 200 + "1]",
    "infinity": '{"by": 1e999}',
    "nan": '{"by": NaN}',
    "surrogates": '"' + "\\ud800" * (MIB // 6 - 9) + '"',
    "a long string": '"' + "a,b:[{" * (MIB // 6 - 9) + '"',
}


@pytest.mark.parametrize("name", TARGETS)
def test_no_text_of_a_megabyte_holds_the_loop(hostile: Hostile, name: str) -> None:
    text = TARGETS[name]
    tracemalloc.start()
    try:
        answered(hostile, lambda: hostile.open(text))
        answered(hostile, lambda: hostile.call(text))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * MIB


SERVED = {
    "lists": b'{"content": [' + b"[]," * (5 * MIB) + b"1]}",
    "deep": b"[" * (4 * MIB),
    "rows": b'{"content": [' + b'{"type":"text","text":""},' * 600_000 + b"1]}",
    "a picture": b'{"content": [{"type":"image","mimeType":"image/png","data":"%b"}]}'
    % (b"iVBORw0K" * (MIB - 99)),
    "a text": b'{"content": [{"type":"text","text":"%b"}]}' % (b"line,[{\\n" * (MIB - 99)),
    "escapes": b'{"content": [{"type":"text","text":"%b"}]}' % (b"\\ud83d\\ude00" * (MIB - 99)),
    "integers": b'{"content": [' + (b"1" * 4000 + b",") * 3000 + b"1]}",
    "floats": b'{"content": [' + b"1.5e300," * MIB + b"1]}",
}


@pytest.mark.parametrize("name", SERVED)
def test_no_answer_of_megabytes_holds_the_loop(hostile: Hostile, name: str) -> None:
    hostile.server.result = SERVED[name]
    try:
        answer = answered(hostile, hostile.call)
    finally:
        hostile.server.result = b"{}"
    assert isinstance(answer, pb.CallToolResponse)


def test_the_probe_sees_a_callback_that_holds_the_loop() -> None:
    async def hold() -> None:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    with held_loops() as held, pytest.raises(AssertionError, match="ms in <Handle"):
        asyncio.run(hold())
        held.check()
