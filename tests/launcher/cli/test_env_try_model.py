"""`flotilla env try --model`: a model by script plays an MCP server's tasks through a real
gateway."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_tasks import write_asked_tasks
from tests.support.http_answers import Answer
from tests.support.launcher import forged_command
from tests.support.repository import ROOT
from tests.support.scripted_model import Say, as_answer, call, completion, serve_model

KEY = "sk-0123456789abcdef"
LONG = "x" * 200_000


@dataclass(frozen=True, slots=True)
class Game:
    """Words of the command that plays two tasks, and its file of conversations."""

    words: tuple[str, ...]
    out: Path

    def play(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            forged_command(*self.words, *more),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=110,
            check=False,
        )

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def game(tmp_path: Path) -> Game:
    spec, tasks = write_asked_tasks(tmp_path, 2, data_id=LONG[:9])
    out = tmp_path / "attempts.jsonl"
    words = ("-m", "flotilla_launcher.cli.app", "env", "try", str(spec))
    return Game((*words, str(tasks), "--out", str(out)), out)


Messages = Sequence[Mapping[str, Any]]


def by_attempt(*scripts: Say) -> Say:
    """Give each conversation that begins the next script; its first message carries the number."""
    begun: list[Say] = []

    def say(messages: Messages) -> Mapping[str, Any] | Answer:
        if len(messages) == 1:
            begun.append(scripts[len(begun)])
            said = begun[-1](messages)
            if isinstance(said, tuple) or not said.get("tool_calls"):
                return said
            return {**said, "content": str(len(begun) - 1)}
        return begun[int(messages[1]["content"])](messages)

    return say


def answers(text: str) -> Say:
    return lambda _messages: {"content": text}


def acts(*calls: tuple[str, str], then: str = "right") -> Say:
    """A model that makes these calls in one turn, and then answers."""
    made = [call(name, arguments, n) for n, (name, arguments) in enumerate(calls)]
    return lambda messages: {"tool_calls": made} if len(messages) == 1 else {"content": then}


def test_a_model_plays_all_tasks_and_reads_the_errors_of_its_calls(game: Game) -> None:
    bad = acts(("fly", "{}"), ("add_note", "not json"), ("add_note", "[1]"), ("list_notes", "{}"))
    say = by_attempt(bad, answers("right <done>"), answers("wrong"), answers("right"))
    with serve_model(say) as (url, asked):
        done = game.play("--model", url, "--attempts", "2", "--concurrency", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert rows == [
        ["attempts", "graded", "passed", "pass@1", "pass@2", "task"],
        ["2", "2", "2", "1.000", "1.000", "ask-0"],
        ["2", "2", "1", "0.500", "1.000", "ask-1"],
        ["4", "4", "3", "0.750", "1.000", "all", "2", "tasks"],
    ]
    assert "scripted plays 2 tasks 2 times" in done.stdout
    offered = {tool["function"]["name"]: tool["function"] for tool in asked.bodies[0]["tools"]}
    assert offered["add_note"]["parameters"]["required"] == ["text"]
    first = game.attempts()[0]
    assert [message["role"] for message in first["messages"]] == [
        *("user", "assistant", "tool", "tool", "tool", "tool", "assistant")
    ]
    task = first["messages"][0]["content"]
    assert task.startswith("Today is 2026-01-31. ")
    assert task.endswith("\nLogged in as: Ann\n\nWhat is 0?")
    *errors, notes = [m["content"] for m in first["messages"] if m["role"] == "tool"]
    assert [json.loads(error)["error"] for error in errors] == [
        "unknown tool 'fly'",
        "arguments is not JSON: Expecting value: line 1 column 1 (char 0)",
        "arguments is a JSON list, not an object",
    ]
    assert LONG[:9] in notes
    assert [m["tool_call_id"] for m in first["messages"][2:6]] == [f"call-{n}" for n in range(4)]
    assert (first["task"], first["attempt"], first["reward"], first["calls"]) == ("ask-0", 1, 1, 4)


def test_what_is_not_the_models_fault_has_no_grade_and_is_never_a_failure(
    game: Game, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    limited = [as_answer({}, 429, retry_after="0")]
    say = by_attempt(
        acts(("crash", "{}")),
        lambda _messages: as_answer({"error": f"wrong key {KEY}"}, 401),
        lambda _messages: as_answer({"choices": []}),
        answers("right"),
    )

    def say_or_refuse(messages: Messages) -> Mapping[str, Any] | Answer:
        return limited.pop() if limited else say(messages)

    with serve_model(say_or_refuse) as (url, asked):
        options = ("--model", url, "--model-key-env", "MY_KEY", "--key", "ask-1")
        done = game.play(*options, "--concurrency", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert rows[0] == ["4", "1", "1", "1.000", "-", "ask-1"]
    crashed, refused, odd, right = game.attempts()
    assert [each["reward"] for each in (crashed, refused, odd, right)] == [None, None, None, 1.0]
    assert crashed["no_grade"].startswith("crash: ")
    assert "answered 401: " in refused["no_grade"]
    assert "its answer is no chat completion: choices" in odd["no_grade"]
    assert asked.headers[-1]["authorization"] == f"Bearer {KEY}"
    assert KEY not in done.stdout + done.stderr + game.out.read_text()


def test_limits_end_an_attempt_with_a_grade_and_say_so(game: Game) -> None:
    endless: Say = lambda _messages: {"tool_calls": [call("list_notes", "{}")]}  # noqa: E731
    cut: Say = lambda _messages: as_answer(completion({"content": "ri"}, "length"))  # noqa: E731
    with serve_model(by_attempt(lambda m: {**endless(m), "content": "0"}, cut)) as (url, _):
        options = ("--attempts", "1", "--max-turns", "3", "--concurrency", "1")
        done = game.play("--model", url, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ask-0 #1: 0, 3 turns were not enough  (3 calls" in done.stdout
    assert "ask-1 #1: 0, a turn was cut at the endpoint's limit of tokens  (0" in done.stdout


def test_ctrl_c_shows_the_scores_so_far_and_leaves_no_gateway(game: Game) -> None:
    def say(messages: Messages) -> Mapping[str, Any] | Answer:
        if "What is 0?" in messages[0]["content"]:
            return {"content": "right"}
        process.send_signal(signal.SIGINT)
        return {"content": "late"}

    with serve_model(say) as (url, _):
        words = (*game.words, "--model", url, "--attempts", "1", "--concurrency", "1")
        # With handlers of its own: a forged process has those of the forge.
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        shown, _ = process.communicate(timeout=110)
    assert process.returncode == 130, shown
    counts = [line.split()[:3] for line in shown.splitlines() if line.split()[-1:] == ["ask-0"]]
    assert counts == [["1", "1", "1"]], shown


def test_options_that_do_not_go_together_are_refused(game: Game) -> None:
    done = game.play("--model", "http://127.0.0.1:9/v1", "--answer", "x")
    assert (done.returncode, "--answer is for a play by hand" in done.stdout) == (1, True)
    game.out.write_text("precious")
    done = game.play("--model", "http://127.0.0.1:9/v1")
    assert (done.returncode, "error: --out: " in done.stdout) == (1, True)
    assert game.out.read_text() == "precious"
    game.out.unlink()
    done = game.play("--model", "a/b", "--vllm-args", "--dtype 'half")
    assert (done.returncode, "--vllm-args: No closing quotation" in done.stdout) == (1, True)
