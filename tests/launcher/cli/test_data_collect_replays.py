"""`flotilla data collect` with an MCP server: killed in the middle of a tool call, and resumed in
a world that answers otherwise."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_answers import Answer, serve_answers
from tests.support.repository import ROOT
from tests.support.scripted_model import MODEL, as_answer, call, completion
from tests.support.task_collector import Collector
from tests.support.waiting import wait_until

VERIFIER = """
def said(env, final_answer=None, conversation=None):
    return 1 if final_answer == "right" else 0
"""
TASK = {"key": "ask", "env_id": "notes", "prompt": "Work.", "verifier_func": VERIFIER}


@pytest.fixture
def collector(tmp_path: Path) -> Collector:
    (tmp_path / "said.sha256").write_text(f"{sha256(VERIFIER.encode()).hexdigest()}  said\n")
    (tmp_path / "block_at").write_text("none")
    server = str(ROOT / "tests/support/blocking_mcp_server.py")
    spec = {
        "env_gateway": {
            "backend": "mcp",
            "servers": [{"transport": "stdio", "command": [sys.executable, server, str(tmp_path)]}],
            "verifiers": {"digests": str(tmp_path / "said.sha256")},
        }
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return Collector(tmp_path, [TASK], [str(tmp_path / "spec.json")])


@contextmanager
def serve_turns(
    *tools: str, on_request: Callable[[int], object] = lambda _number: None
) -> Generator[tuple[str, list[str]]]:
    """Serve a model that calls these tools, one a turn, and then answers "right" in every other
    try; yield its URL, and the keys of the turns that it is asked for."""
    keys, tries = list[str](), list[str]()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        if request.command == "GET":
            return as_answer({"data": [{"id": MODEL}]})
        keys.append(request.headers["idempotency-key"])
        on_request(len(keys))
        one = keys[-1].rpartition("-")[0]
        if one not in tries:
            tries.append(one)
        turn = sum(each["role"] == "assistant" for each in json.loads(body)["messages"])
        message: dict[str, Any] = {"content": ("right", "wrong")[tries.index(one) % 2]}
        if turn < len(tools):
            message = {"tool_calls": [call(tools[turn], "{}", turn)]}
        return as_answer(completion(message))

    with serve_answers(answer) as address:
        yield f"{address}/v1", keys


def kill_in_call(collector: Collector, number: int, *words: object) -> None:
    """Run the command, and kill it in the call of the tool that has this number."""
    worked = collector.folder / "worked"
    worked.write_text("")
    (collector.folder / "block_at").write_text(str(number))
    process = collector.start(*words)
    wait_until(lambda: len(worked.read_text()) == number or process.poll() is not None)
    process.kill()
    shown, _ = process.communicate(timeout=110)
    assert process.returncode == -signal.SIGKILL, shown
    (collector.folder / "block_at").write_text("none")


@pytest.mark.slow
def test_a_command_that_is_killed_in_a_tool_call_or_a_replay_pays_for_nothing_again(
    collector: Collector,
) -> None:
    with serve_turns("work") as (url, keys):
        words = ("--teacher", url, "--tries", 2, "--concurrency", 1)
        # In the first try; then, after its second call and that of the other try, in the replay.
        kill_in_call(collector, 1, *words)
        assert len(keys) == 1
        kill_in_call(collector, 3, *words)
        assert len(keys) == 4
        done = collector.collect(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (len(keys), len(set(keys))) == (4, 4)
    assert collector.fates() == {"ask": "kept"}
    assert collector.query("SELECT ended, reward FROM replays") == [(0, None), (1, 1.0)]
    solution = {"key": "ask", "calls": [{"name": "work", "arguments": {}}], "answer": "right"}
    assert collector.rows("solutions.jsonl") == [solution]


@pytest.mark.slow
def test_a_try_whose_environment_answers_otherwise_after_a_kill_ends_without_a_grade(
    collector: Collector,
) -> None:
    running = list[subprocess.Popen[str]]()

    def kill(number: int) -> None:
        if number == 3:
            running[-1].kill()

    with serve_turns("draw_number", "work", on_request=kill) as (url, keys):
        words = ("--teacher", url, "--tries", 2, "--concurrency", 1)
        running.append(collector.start(*words))
        running[-1].communicate(timeout=110)
        assert running[-1].returncode == -signal.SIGKILL
        done = collector.collect(*words)
        assert done.returncode == 1, done.stdout + done.stderr
        reason = "its environment did not answer turn 1 again as before"
        assert reason in done.stdout
        first, second = collector.rows("evidence.jsonl")[0]["tries"]
        assert (first["reward"], reason in first["no_grade"]) == (None, True)
        assert (second["reward"], first["requests"], second["requests"]) == (0.0, 3, 3)
        # The turns of the first try were not asked for again.
        assert len(keys) == len(set(keys)) == 6
        done = collector.collect(*words, "--retry-ungraded")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (len(keys), collector.fates()) == (9, {"ask": "kept"})
