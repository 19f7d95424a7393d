"""`flotilla init`: the command itself, with a gateway and servers over stdio that are real."""

import asyncio
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
from mcp.server import MCPServer
from mcp_types import ToolAnnotations
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla_reading.own_tools import folder_files
from flotilla_reading.own_tools.values import is_harmless
from tests.launcher.cli import noted_tools_server
from tests.support.launcher import forged_command
from tests.support.library_server import serving_tools
from tests.support.scripted_model import serve_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

SERVER = Path(noted_tools_server.__file__)
WRITTEN = Path(folder_files.__file__).parent / "written"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        forged_command("-m", "flotilla_launcher.cli.app", *words),
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


async def test_of_a_server_at_a_url_only_readers_are_called_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "the-shops-key")
    prices = {f"tea {number}": 7 * number + 3 for number in range(12)}
    bought: list[str] = []
    keys: set[bytes] = set()

    def list_items() -> str:
        return json.dumps([{"item": item} for item in prices])

    def price_of(item: str) -> str:
        return json.dumps({"price": prices[item]})

    shop = MCPServer("shop", log_level="WARNING")
    for reader in (list_items, price_of):
        shop.add_tool(reader, annotations=ToolAnnotations(read_only_hint=True))
    shop.add_tool(bought.append, name="buy")

    def around(app: ASGIApp) -> ASGIApp:
        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                keys.add(dict(scope["headers"]).get(b"authorization", b""))
            await app(scope, receive, send)

        return noting

    async with serving_tools(shop, around=around) as url:
        words = ("own", "--mcp", f"{url}/mcp", "--key-env", "SHOP_KEY", "--tasks", "4")
        code, output = await asyncio.to_thread(run, tmp_path, "init", *words)
    assert code == 0, output
    assert "tasks ask what tools answer: no state can be graded here" in output
    tasks = read_tasks(tmp_path / "own")
    assert [task["offered_tools"] for task in tasks] == [["list_items", "price_of"]] * 6
    assert {int(task["metadata"]["answer"]) for task in tasks} < set(prices.values())
    assert (bought, keys) == ([], {b"Bearer the-shops-key"})
    assert not [p for p in (tmp_path / "own").rglob("*.*") if b"the-shops-key" in p.read_bytes()]


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
    rewritten = [b for b in asked.bodies if "Write this request" in b["messages"][0]["content"]]
    assert len(rewritten) == len(prompts) == 6
    one = [prompt for prompt in prompts if " Then " not in prompt]
    assert one
    assert all(prompt.startswith("Please help: ") for prompt in one)
    assert not any("Please" in prompt for prompt in prompts if prompt not in one)
    assert f"prompts in the model's words: {len(one)} of 6" in output


def test_a_model_names_the_calls_of_harder_tasks_which_are_played_like_all(tmp_path: Path) -> None:
    def add(name: str) -> dict[str, Any]:
        return {"tool": "add_note", "arguments": {"name": name, "text": f"about {name}"}}

    answers = iter(
        [
            json.dumps([add("up"), add("down"), add("left"), add("right")]),
            "Of course:\n" + json.dumps([add("one"), add("two"), add("three"), add("four")]),
            # What changes nothing more is no task of four calls.
            *[json.dumps([add("again")] * 4)] * 8,
        ]
    )

    def say(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        asked = messages[0]["content"]
        if "Write this request" in asked:
            return {"content": asked.rpartition("\n")[2]}
        assert "add_note: Write a note." in asked
        return {"content": next(answers)}

    with serve_model(say) as (url, _):
        words = ("init", "own", "--mcp", server(), "--tasks", "6", "--model", url)
        code, output = run(tmp_path, *words)
    assert code == 0, output
    assert "tasks of the model's calls: 2, asked for 4" in output
    prompts = [task["prompt"] for task in read_tasks(tmp_path / "own")]
    hard = [prompt for prompt in prompts if prompt.count(" Then ") == 3]
    assert (len(prompts), len(hard)) == (9, 2)
    assert any('"about up"' in prompt for prompt in hard)


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
        (("own", "--mcp", "no-such-server {episode_dir}"), "no command 'no-such-server'"),
        (("own", "--mcp", "./server.py"), "no command './server.py'"),
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
