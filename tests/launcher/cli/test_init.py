"""`flotilla init`: the command itself, with a gateway and servers over stdio that are real."""

import json
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.reading.own_tools import folder_files
from services.reading.own_tools.values import is_harmless
from tests.launcher.cli import noted_tools_server
from tests.support.launcher import forged_command
from tests.support.scripted_model import serve_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

SERVER = Path(noted_tools_server.__file__)
WRITTEN = Path(folder_files.__file__).parent / "written"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        forged_command("-m", "services.launcher.cli.app", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def run(folder: Path, *words: str) -> tuple[int, str]:
    with start(folder, *words) as process:
        output, errors = process.communicate(timeout=200)
    assert "Traceback" not in errors, errors
    return process.returncode, output


def server(*words: str) -> str:
    return shlex.join([sys.executable, str(SERVER), *words])


def make(folder: Path, *words: str, mcp: str) -> tuple[int, str]:
    return run(folder, "init", "own", "--mcp", mcp, "--tasks", "4", *words)


def read_tasks(own: Path) -> list[dict[str, Any]]:
    files = ("tasks/train.jsonl", "tasks/heldout.jsonl")
    return [json.loads(line) for name in files for line in (own / name).read_text().splitlines()]


def reuses(own: Path) -> bool:
    (table,) = tomllib.loads((own / "run.toml").read_text())["env_gateway"]["servers"]
    return table["state_in_folder"]


def test_a_folder_is_made_whose_tasks_are_valid_and_whose_test_passes(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/milk.note").write_text("no milk")
    code, output = make(tmp_path, "--state", "first", mcp=server())
    own = tmp_path / "own"
    assert (code, len(read_tasks(own)), reuses(own)) == (0, 6, True), output
    assert "4 tasks to train on, 2 held out" in output
    check = ("data", "check", "run.toml", "tasks/train.jsonl", "--solutions", "solutions.jsonl")
    assert run(own, *check)[0] == 0
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert subprocess.run(tests, cwd=own, check=False, capture_output=True).returncode == 0
    again = make(tmp_path, mcp=server())
    assert again == (1, "error: own exists and is not empty: choose another name\n")


def test_hostile_tools_get_neither_out_of_the_folder_nor_into_code_or_prompts(
    tmp_path: Path,
) -> None:
    code, output = make(tmp_path, mcp=server("--hostile"))
    own = tmp_path / "own"
    assert code == 0, output
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    assert not list(own.rglob("escaped"))
    for name in ("verifier.py", "test_tasks.py"):
        (found,) = own.rglob(name)
        assert found.read_bytes() == (WRITTEN / name).read_bytes()
    assert len(list(own.rglob("*.py"))) == 2
    spec = tomllib.loads((own / "run.toml").read_text())
    assert list(spec) == ["name", "seed", "policy", "env_gateway", "rollout", "launcher", "learner"]
    tasks = read_tasks(own)
    assert tasks
    for task in tasks:
        told = [part.strip('"') for part in task["prompt"].split('"')[1::2]]
        assert all(is_harmless(value) for value in told), task["prompt"]
        assert set(task["prompt"]).isdisjoint("<>{}|\\\n\r`$"), task["prompt"]
    assert "left alone, for its name is none that a model can write" in output
    assert "\x1b" not in output


def test_a_server_that_keeps_state_has_a_process_for_each_episode(tmp_path: Path) -> None:
    code, output = make(tmp_path, "--concurrency", "2", mcp=server("--keep", "process"))
    assert (code, reuses(tmp_path / "own")) == (0, False), output
    assert "its processes keep state" in output


def test_a_server_whose_state_outlives_it_is_told_so_and_gets_no_task_that_changes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "kept").mkdir()
    # How many notes its own calls leave there, before it sees that they stay, is chance.
    for number in range(8):
        (tmp_path / f"kept/errand{number}.note").write_text(f"errand number {number * 17 + 3}")
    code, output = make(tmp_path, mcp=server("--keep", str(tmp_path / "kept")))
    assert "give it a place there, such as --env DATA_FILE={episode_dir}/data.json" in output
    assert code == 0, output
    tasks = read_tasks(tmp_path / "own")
    assert {tuple(task["offered_tools"]) for task in tasks} == {("list_notes", "read_note")}
    assert {tuple(task["metadata"]) for task in tasks} == {("answer",)}


def test_a_server_of_which_nothing_can_be_graded_is_told_why(tmp_path: Path) -> None:
    code, output = make(tmp_path, mcp=server("--blind"))
    assert code == 1
    assert "no tasks: none of its tools says that it only reads" in output
    assert "--read-only list_items" in output
    assert (tmp_path / "own/run.toml").exists()
    assert not (tmp_path / "own/tasks").exists()


def test_a_model_writes_prompts_that_still_say_all(tmp_path: Path) -> None:
    def say(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        plain = messages[0]["content"].rpartition("\n")[2]
        # Of two notes it forgets what the second one says.
        return {"content": "Please help: " + plain.split(" Then ")[0]}

    with serve_model(say) as (url, asked):
        code, output = make(tmp_path, "--model", url, mcp=server())
    assert code == 0, output
    prompts = [task["prompt"] for task in read_tasks(tmp_path / "own")]
    assert len(asked.bodies) == len(prompts) == 6
    one = [prompt for prompt in prompts if " Then " not in prompt]
    assert one
    assert all(prompt.startswith("Please help: ") for prompt in one)
    assert not any("Please" in prompt for prompt in prompts if prompt not in one)
    assert f"prompts in the model's words: {len(one)} of 6" in output


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with start(tmp_path, "init", "own", "--mcp", server(), "--tasks", "500") as process:
        assert process.stdout is not None
        while "probes show" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert process.returncode == 130
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("own", "--mcp", "'"), "No closing quotation"),
        (("own", "--mcp", ""), "give a command or a URL"),
        (("a b", "--mcp", "x"), "must be letters, digits"),
        (("own", "--mcp", "x", "--env", "A"), "write NAME=VALUE"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_starts(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, output = run(tmp_path, "init", *words)
    assert code != 0
    assert message in output
    assert not list(tmp_path.iterdir())
