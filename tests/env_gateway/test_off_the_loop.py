"""Large answers are read and passed on to the caller off the event loop: the CPU time of the loop's
thread is a small share of what the process spends on them, however slow the machine is."""

import base64
import gc
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.adapters import database_dump as dump
from flotilla_env_gateway.adapters.embedded.backend import EmbeddedInstance
from flotilla_env_gateway.adapters.fleet.screen import parse_screenshot
from flotilla_env_gateway.adapters.fleet.wire import InitialState, SnapshotCache
from flotilla_env_gateway.adapters.fleet_openenv.instance import FleetOpenEnvInstance
from flotilla_env_gateway.adapters.mcp.session import McpSession
from flotilla_env_gateway.adapters.mcp.stdio import StdioInstance
from flotilla_env_gateway.adapters.openenv.instance import OpenEnvInstance
from flotilla_env_gateway.api.episode_service import conversation_of
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import ScreenConfig
from flotilla_env_gateway.config.openenv import OpenEnvConfig
from flotilla_env_gateway.episodes.episode_session import MediaStore
from flotilla_env_gateway.grading import grader
from flotilla_env_gateway.grading.passed_text import PassedText
from flotilla_env_gateway.large_values import dump_json_aside
from flotilla_env_gateway.ports import CallResult, Execution, Rows, Submission, Text, Tool
from flotilla_env_gateway.tools.computer_tool import Screen, keep_unscaled, make_media
from flotilla_env_gateway.verify.protocol import MessageBudget
from flotilla_env_gateway.verify.verifier_process import VerifierProcess

MOST = 0.1
# The least of so many: returning the pages of a large text to the system is charged to whichever
# thread frees it last.
TIMES = 3
VERDICTS: Any = grader
MIB = 2**20
PICTURE = base64.b64encode(b"\x89PNG" + b"p" * (11 * MIB)).decode()
SHOWN = json.dumps({"base64_image": PICTURE})
MANY = [{"text": "x", "type": "text"}] * 40_000
SCREEN = Screen(ScreenConfig(), [Tool("computer", "A screen.", "{}")], keep_unscaled)
SUBMISSION = Submission(Task(key="t", prompt="p", env_key="e"), "", json.dumps(MANY))


def answering(answer: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def answered(*_: Any, **__: Any) -> Any:
        return answer

    return answered


def mcp(result: Any) -> Any:
    session: Any = McpSession(None)  # pyright: ignore[reportArgumentType]
    session._open_until = session._request = answering(result)
    return session


def stdio(result: Any) -> Any:
    request: Any = SimpleNamespace(episode_id="e", task=SUBMISSION.task)
    server = McpServer(transport="stdio", command=("cat",))
    episode: Any = SimpleNamespace(unanswered=0, note_listed=lambda _: False, listed_ahead={})
    return StdioInstance(SimpleNamespace(), request, episode, server, mcp(result))  # pyright: ignore[reportArgumentType]


def openenv(data: Any) -> Any:
    backend, channel = (
        SimpleNamespace(),
        SimpleNamespace(send_request=answering(data), is_open=True),
    )
    config = OpenEnvConfig(url="http://nowhere", image_fields=("screen",))
    return OpenEnvInstance(backend, config, channel, SUBMISSION.task, {}, data, "i")  # pyright: ignore[reportArgumentType]


def fleet_openenv(answer: Any) -> Any:
    worker: Any = SimpleNamespace(
        send_request=answering(answer), read_answer=answering(answer), pid=1
    )
    request: Any = SimpleNamespace(episode_id="e", task=SUBMISSION.task)
    created = dict.fromkeys(("instance_id", "env_version", "data_version"), "")
    return FleetOpenEnvInstance(None, worker, created, request)  # pyright: ignore[reportArgumentType]


def embedded(answer: Any) -> Any:
    worker: Any = SimpleNamespace(send_request=answering(answer))
    return EmbeddedInstance(SimpleNamespace(), worker, "e", "v1")  # pyright: ignore[reportArgumentType]


def sandbox() -> Any:
    pipe: Any = SimpleNamespace(write=lambda _: None, drain=answering(None))  # pyright: ignore[reportUnknownLambdaType]
    return VerifierProcess(SimpleNamespace(stdin=pipe, stdout=pipe))  # pyright: ignore[reportArgumentType]


def hearing(line: bytes) -> Any:
    worker = sandbox()
    worker._stdout = SimpleNamespace(readline=answering(line))
    return worker


def copied() -> Awaitable[bytes | None]:
    made = ["items", "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)"]
    rows = [["", *made], *([["items", n, "x" * 700] for n in range(19_000)])]

    async def run_query(_db: str, sql: str) -> Rows:
        return Rows((), [made] if sql == dump.SCHEMA_SQL else rows)

    return SnapshotCache().get_snapshot("current", InitialState(("e", "v"), "v", ("e",)), run_query)


CONTENT = {"content": [{"type": "image", "mimeType": "image/png", "data": PICTURE}]}
STRUCTURED = {"structuredContent": MANY}
LISTED = {"tools": [{"name": f"t{n}", "inputSchema": {"a": [1, 2]}} for n in range(30_000)]}
OBSERVED = {"observation": {"screen": PICTURE, "rows": MANY}}
FUNCTIONS = [{"function": tool | {"parameters": tool["inputSchema"]}} for tool in LISTED["tools"]]
IMAGE = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}]
GRADED = {"reward": 1.0, "returned": 1.0, "stdout": "", "verifier_error": None}
ROWS = {"columns": ["a"], "rows": [[1, 2]] * 100_000}
DONE = json.dumps({"done": {"stdout": "\n" * (2 * MIB - 99)}}).encode()
PRINTED = "App x: 0 \n" * MIB
TRANSCRIPT = b'{"role": "user"}\n' * 900_000
WORK: dict[str, Callable[[], Awaitable[Any]]] = {
    "a picture over MCP": lambda: mcp(CONTENT).call_tool("look", {}, 9.0),
    "structured content over MCP": lambda: mcp(STRUCTURED).call_tool("look", {}, 9.0),
    "tools over MCP": lambda: mcp(LISTED).list_tools(9.0),
    "a picture over stdio": lambda: stdio(CONTENT).call_tool("look", {}, timeout_s=9.0),
    "tools over stdio": lambda: stdio(LISTED).list_tools(timeout_s=9.0),
    "a picture of OpenEnv's": lambda: openenv(OBSERVED).call_tool("step", {}, timeout_s=9.0),
    "OpenEnv's first picture": lambda: openenv(OBSERVED).get_first_observation(timeout_s=9.0),
    "OpenEnv's tools": lambda: openenv(
        {"observation": {"tools": LISTED["tools"]}, "type": "call_tool"}
    ).list_tools(timeout_s=9.0),
    "FleetTaskEnv's picture": lambda: fleet_openenv(
        {"info": {"tool_result": IMAGE}, "done": False}
    ).call_tool("look", {}, timeout_s=9.0),
    "FleetTaskEnv's first picture": lambda: fleet_openenv(
        {"observation": {"initial_screenshot": IMAGE}}
    ).get_first_observation(timeout_s=9.0),
    "FleetTaskEnv's tools": lambda: fleet_openenv({"observation": {"tools": FUNCTIONS}}).list_tools(
        timeout_s=9.0
    ),
    "a transcript for FleetTaskEnv": lambda: fleet_openenv(GRADED).grade_submission(
        SUBMISSION, timeout_s=9.0
    ),
    "rows of an embedded app": lambda: embedded(ROWS).query_database(
        "current", "", (), timeout_s=9.0
    ),
    "a copy of an embedded app's database": lambda: embedded(
        {"content": {"base64": PICTURE}}
    ).snapshot_database("current", timeout_s=9.0),
    "a copy of a database": copied,
    "a copy for a verifier": lambda: sandbox()._send_message(PICTURE),
    "a line of a sandbox": lambda: hearing(DONE)._receive_message(MessageBudget()),
    "what was printed": lambda: VERDICTS._judge_aside(
        Execution(result=0, stdout=PRINTED), 1, phrase_passed=False
    ),
    "what a tool answered": lambda: PassedText().note_parts([Text("judge é " * (2 * MIB))]),
    "rows for a verifier": lambda: sandbox()._send_message(ROWS),
    "Fleet's first picture": lambda: parse_screenshot(CallResult((Text(SHOWN),)), in_browser=False),
    "positions in a text": lambda: SCREEN.convert_parts([Text("X=1,Y=1 " * (MIB // 4))]),
    "a text that is kept": lambda: MediaStore(MIB).store_large_parts((Text("é" * (8 * MIB)),)),
    "a transcript": lambda: conversation_of(bytearray(TRANSCRIPT)),
    "a request": lambda: dump_json_aside(MANY),
}


@pytest.mark.parametrize("name", WORK)
async def test_large_answers_cost_the_event_loop_next_to_nothing(name: str) -> None:
    shares: list[float] = []
    # A collection looks at all that the tests have loaded, in whichever thread it begins.
    gc.collect()
    for _ in range(TIMES):
        work = WORK[name]()
        began, process_began = time.thread_time(), time.process_time()
        made = await work
        of_loop = time.thread_time() - began
        shares.append(of_loop / (time.process_time() - process_began))
        if isinstance(made, Execution):
            assert made.error is None
    assert min(shares) < MOST


async def test_a_picture_is_the_same_wherever_it_is_decoded() -> None:
    small = base64.b64encode(b"\x89PNG small").decode()
    for encoded, data in ((small, b"\x89PNG small"), (PICTURE, base64.b64decode(PICTURE))):
        content = [{"type": "image", "mimeType": "image/png", "data": encoded}]
        reported = await mcp({"content": content}).call_tool("look", {}, 9.0)
        assert reported.parts == (make_media(data, "image/png"),)
