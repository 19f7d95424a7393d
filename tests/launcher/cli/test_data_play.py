"""`flotilla data play`: a person plays an MCP server's tasks through a real gateway."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_reading.demonstrations.conversation_rows import read_row
from tests.support.asked_tasks import write_asked_tasks
from tests.support.launcher import forged_command
from tests.support.repository import ROOT


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    spec, tasks = write_asked_tasks(tmp_path, 2)
    out = str(tmp_path / "played.jsonl")
    command = ("-m", "flotilla_launcher.cli.app", "data", "play", str(spec), str(tasks))
    return (*command, "--out", out)


def play(words: tuple[str, ...], *lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forged_command(*words),
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
        check=False,
    )


def rows(words: tuple[str, ...]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(words[-1]).read_text().splitlines()]


def test_what_passes_becomes_a_conversation_that_imitation_reads(words: tuple[str, ...]) -> None:
    done = play(
        words,
        *("list_notes", "fly away=1", "add_note text='a b'", "fail {}"),
        *("/undo", "/nothing", "what is this?", "/done right", "/quit"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("tool     add_note(text)", "fly: bad_tool", "cannot be taken back", "reward   1"):
        assert shown in done.stdout
    assert "there is no /nothing" in done.stdout
    assert "not a call: what is this?" in done.stdout
    (row,) = rows(words)
    said = read_row(row, "played", "line 1")
    assert said is not None
    assert (said.task_key, said.reward, len(said.tools)) == ("ask-0", 1.0, 7)
    # A slip that reached no tool is not imitated; what a tool refused is shown as one's own error.
    made = [call for m in row["messages"] for call in m.get("tool_calls", ())]
    assert [call["function"]["name"] for call in made] == ["list_notes", "add_note", "fail"]
    assert json.loads(made[1]["function"]["arguments"]) == {"text": "a b"}
    errors = [m["content"] for m in row["messages"] if m.get("tool_call_id") == made[2]["id"]]
    assert "error" in json.loads(errors[0])
    assert row["messages"][-1] == {"role": "assistant", "content": "right"}


def test_what_fails_is_played_once_more_and_what_is_kept_never_again(
    words: tuple[str, ...],
) -> None:
    done = play(words, "/done wrong", "/reset", "/done right", "/skip")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("task     ask-0 (1 of 2)") == 3
    assert "not kept: only a reward of 1 is imitated" in done.stdout
    assert [row["key"] for row in rows(words)] == ["ask-0"]
    again = play(words, "/done right")
    assert "has 1 of 2 tasks, which are not played again" in again.stdout
    assert "task     ask-1 (1 of 1)" in again.stdout
    assert [row["key"] for row in rows(words)] == ["ask-0", "ask-1"]
    assert "has 2 of 2 tasks" in play(words).stdout


def test_ctrl_c_ends_the_play_and_keeps_what_is_in_the_file(words: tuple[str, ...]) -> None:
    pipe = subprocess.PIPE
    # With handlers of its own: a forged process has those of the forge.
    command = (sys.executable, *words)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("/done right\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("task     ask-1"):
                process.send_signal(signal.SIGINT)
        process.stdin.close()
    assert process.returncode == 130
    assert [row["key"] for row in rows(words)] == ["ask-0"]


def test_a_file_of_something_else_and_an_unknown_task_are_refused(words: tuple[str, ...]) -> None:
    Path(words[-1]).write_text("precious\n")
    done = play(words)
    assert (done.returncode, "line 1" in done.stdout) == (2, True), done.stdout
    assert Path(words[-1]).read_text() == "precious\n"
    Path(words[-1]).unlink()
    done = play((*words[:-2], "--key", "ask-9", *words[-2:]))
    assert (done.returncode, "has no task 'ask-9'" in done.stdout) == (1, True), done.stdout
