"""A model that vLLM serves as a child: its start is shown, and nothing of it is left."""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from flotilla_launcher.cli.adapters import vllm_server
from flotilla_launcher.cli.adapters.vllm_server import serve_model
from flotilla_launcher.cli.terminal import CommandError
from tests.support.repository import ROOT


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In place of vLLM; the file in which it notes its processes and arguments."""
    monkeypatch.setattr(vllm_server, "_MODULE", "tests.support.stand_in_vllm")
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FLOTILLA_NOTED", str(tmp_path / "noted"))
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-for-others")
    return tmp_path / "noted"


def _read_words(path: Path) -> list[str]:
    return path.read_text().split()


def _is_ended(pid: int) -> bool:
    """Wait for a process that was killed, whose parent may never ask for it."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
async def test_the_server_and_its_engine_end_with_the_play(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_SHOW_S", 0.1)
    shown: list[str] = []
    async with serve_model("models/a", ["--max-model-len", "64"], shown.append) as socket:
        server, engine, key, *words = _read_words(stand_in)
        assert socket.is_socket()
        assert psutil.pid_exists(int(server)) and psutil.pid_exists(int(engine))
    assert not psutil.pid_exists(int(server))
    assert _is_ended(int(engine))
    assert (key, words[-2:], socket.exists()) == ("None", ["--max-model-len", "64"], False)
    # Else vLLM would take most of the machine's memory where it has no GPU.
    assert ("--kv-cache-memory-bytes" in words) == version("torch").endswith("+cpu")
    assert any("vLLM is loading models/a" in line for line in shown)
    assert "models/a is served after" in shown[-1]


async def test_a_server_that_ends_is_reported_with_its_first_error_and_its_last_words(
    stand_in: Path,
) -> None:
    words = "code 3: ValueError: no such model\n(.*\n)*RuntimeError: the cause is above"
    with pytest.raises(CommandError, match=words):
        async with serve_model("broken", (), print):
            pass


async def test_without_vllm_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "find_spec", lambda _name: None)
    with pytest.raises(
        CommandError, match=r"no URL, and vLLM.*pip install 'flotilla-rl\[rollout\]'"
    ):
        async with serve_model("some/model", (), print):
            pass


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(580)
def test_a_model_that_vllm_serves_plays_a_task(engine_folder: Path, tmp_path: Path) -> None:
    options = (
        "--enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 268435456 --block-size 32"
        " --dtype float32"
    )
    out = tmp_path / "attempts.jsonl"
    words = ["docs/examples/notes.toml", "docs/examples/notes_tasks.json", "--attempts", "2"]
    words += ["--model", str(engine_folder), "--vllm-args", options, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "flotilla_launcher.cli.app", "env", "try", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=560,
        check=False,
    )
    attempts = [json.loads(line) for line in out.read_text().splitlines()]
    # Its weights are random: it writes noise, which is graded.
    assert (done.returncode, [each["reward"] for each in attempts]) == (0, [0.0, 0.0]), done.stdout
    assert all(each["messages"][1]["role"] == "assistant" for each in attempts)
    assert "pass@2" in done.stdout
