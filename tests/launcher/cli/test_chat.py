"""`flotilla chat`: a model by script behind a real server, with a real gateway's tools."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_tasks import write_asked_tasks
from tests.support.http_answers import Answer
from tests.support.launcher import forged_command
from tests.support.repository import ROOT
from tests.support.scripted_model import as_answer, call, serve_model

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chat:
    """Words of the command that talks about two tasks."""

    words: tuple[str, ...]

    def say(self, *lines: str, more: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            forged_command(*self.words, *more),
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=110,
            check=False,
        )


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    spec, tasks = write_asked_tasks(tmp_path, 2)
    words = ("-m", "flotilla_launcher.cli.app", "chat", str(spec), "--tasks", str(tasks))
    return Chat((*words, "--runs", str(tmp_path)))


def says(messages: Messages) -> Mapping[str, Any] | Answer:
    """Does what the last line names: notes it by a tool, or answers."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"content": f"it says {last['content']} <done>"}
    if "note" in last["content"]:
        return {"content": "well", "tool_calls": [call("add_note", '{"text": "milk"}')]}
    if "fail" in last["content"]:
        return as_answer({"error": "too long"}, 400)
    return {"content": "right", "reasoning_content": "hm"}


def test_a_model_answers_lines_with_the_tools_of_the_environment(chat: Chat) -> None:
    with serve_model(says) as (url, asked):
        lines = ("note it", "/tools", "note it again", "/fly", "/grade", "/reset", "note it", "hi")
        done = chat.say(*lines, more=("--model", url))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.splitlines()
    turn = [
        "model    well",
        'call     add_note {"text": "milk"}',
        "answer   2",
        "model    it says 2",
    ]
    assert [line for line in shown if line in turn] == [*turn, *turn[:2], *turn]
    # The second note of an episode is its third, and /reset begins with a fresh one.
    assert "answer   3" in shown
    assert "thinks   hm" in shown
    assert any(line.startswith("tool     add_note(text)  Write a note") for line in shown)
    assert any(line.startswith("there is no /fly: /tools") for line in shown)
    assert any("--task KEY begins with one" in line for line in shown)
    # The first line stands where a task's prompt would: after the environment's facts.
    first = asked.bodies[0]["messages"][0]["content"]
    assert first.startswith("Today is 2026-01-31. ") and first.endswith("Ann\n\nnote it")
    assert [len(body["messages"]) for body in asked.bodies] == [1, 3, 5, 7, 1, 3, 5]
    offered = [tool["function"]["name"] for tool in asked.bodies[0]["tools"]]
    assert "add_note" in offered


def test_a_task_begins_the_conversation_and_is_graded_at_its_end(chat: Chat) -> None:
    with serve_model(says) as (url, asked):
        done = chat.say("/grade", "/grade", "note it", more=("--model", url, "--task", "ask-1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked.bodies[0]["messages"][0]["content"].endswith("What is 1?")
    assert "What is 1?\n" in done.stdout
    # This environment can be graded again: at the end it is, since there are more turns.
    rewards = [line for line in done.stdout.splitlines() if line.startswith("reward")]
    assert rewards == ["reward   1", "reward   1", "reward   0"]


def test_a_line_that_the_model_cannot_answer_is_as_if_never_said(chat: Chat) -> None:
    with serve_model(says) as (url, asked):
        done = chat.say("fail now", "hi", more=("--model", url))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model gave no answer: " in done.stdout
    assert "answered 400" in done.stdout
    assert [len(body["messages"]) for body in asked.bodies] == [1, 1]


def test_ctrl_c_ends_the_turn_and_pressed_again_the_conversation(chat: Chat) -> None:
    waiting_ended = threading.Event()

    def say(messages: Messages) -> Mapping[str, Any]:
        if "wait" in messages[-1]["content"]:
            process.send_signal(signal.SIGINT)
            waiting_ended.wait(20)
        return {"content": "right"}

    with serve_model(say) as (url, asked):
        command, pipe = (sys.executable, *chat.words, "--model", url), subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("wait for me\n")
            process.stdin.flush()
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line.strip())
                if line.startswith("the turn was ended"):
                    waiting_ended.set()
                    process.stdin.write("hello\n")
                    process.stdin.flush()
                if line.startswith("model    right"):
                    process.send_signal(signal.SIGINT)
                if line.startswith("Ctrl-C again") and "model    right" in seen:
                    # A second signal within an instant is the same press.
                    threading.Timer(0.5, process.send_signal, (signal.SIGINT,)).start()
            assert process.wait(60) == 130, seen
    assert [body["messages"][-1]["content"].split("\n")[-1] for body in asked.bodies] == [
        "wait for me",
        "hello",
    ]
    assert [len(body["messages"]) for body in asked.bodies] == [1, 1]


def test_what_cannot_be_talked_about_is_refused_with_what_to_do(chat: Chat, tmp_path: Path) -> None:
    def refusal(*more: str) -> str:
        done = chat.say(more=more)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    nowhere = ("--model", "http://127.0.0.1:9/v1")
    assert "is a run spec: name what to talk with, --model" in refusal()
    shown = refusal(*nowhere, "--task", "ask-7")
    assert "has the key 'ask-7'; the first have: ask-0, ask-1" in shown
    assert "they are of: notes" in refusal(*nowhere, "--env", "mail")
    chat = Chat((*chat.words[:3], "nobody", "--runs", str(tmp_path)))
    assert "neither a run spec nor a run" in refusal()
    run = tmp_path / "begun"
    run.mkdir()
    (run / "journal.sqlite").touch()
    (run / "spec.json").write_text(json.dumps({"env_gateway": {}, "learner": {}}))
    chat = Chat((*chat.words[:3], "begun", "--runs", str(tmp_path)))
    assert "the spec names no tasks, whose environment to open: pass --tasks" in refusal()
