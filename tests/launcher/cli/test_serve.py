"""`flotilla serve`: the command as a process, with a server in place of vLLM's."""

import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from flotilla_common.rpc.free_ports import free_port
from tests.support.repository import ROOT

SPEC = {
    "name": "made",
    "policy": {"model": "Qwen/Qwen3-4B", "max_model_len": 512, "dtype": "float32"},
    "rollout": {"dialect": {"name": "full"}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A completed run, whose model no engine reads."""
    run = tmp_path / "runs/made"
    checkpoint = run / "checkpoints/step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as db:
        db.execute("CREATE TABLE checkpoints (step INTEGER, directory TEXT)")
        db.execute("INSERT INTO checkpoints VALUES (3, ?)", (str(checkpoint),))
    (run / "spec.json").write_text(json.dumps(SPEC))
    (run / "model").mkdir()
    (run / "model/SHA256SUMS").touch()
    return run


def start(run: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Serve the run by a package that is found as vLLM, and notes its processes and arguments."""
    package = run.parent.parent / "packages/vllm/entrypoints/launchers/api_server"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, *package.parents[:3]):
        (folder / "__init__.py").touch()
    (package / "entry.py").write_text("from tests.support.stand_in_vllm import main\nmain()\n")
    path = os.pathsep.join([str(package.parents[3]), str(ROOT)])
    command = (sys.executable, "-m", "flotilla_launcher.cli.app", "serve", "made", *words)
    return subprocess.Popen(
        (*command, "--runs", str(run.parent)),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "FLOTILLA_NOTED": str(run / "noted"), **variables},
    )


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            break
    return lines


def options(run: Path) -> Mapping[str, str]:
    words = (run / "noted").read_text().split()
    return dict(pairwise(words))


def is_ended(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_a_runs_model_is_served_until_ctrl_c_which_ends_the_server_and_its_engine(
    run: Path,
) -> None:
    port = str(free_port())
    with start(run, "--port", port, "--vllm-args", "--max-num-seqs 7") as process:
        lines = read_until(process, "curl ")
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health", trust_env=False).is_success
        assert f"made@3 is served at {url}/v1; Ctrl-C ends it. For example:" in lines
        assert any('the run\'s dialect is "full"' in line for line in lines)
        request = shlex.split(lines[-1])
        assert request[:2] == ["curl", f"{url}/v1/chat/completions"]
        assert json.loads(request[-1])["model"] == "made@3"
        given = options(run)
        assert given["--model"] == str(run / "model")
        assert (given["--served-model-name"], given["--max-model-len"]) == ("made@3", "512")
        assert (given["--max-num-seqs"], given["--load-format"]) == ("7", "safetensors")
        server, engine = map(int, (run / "noted").read_text().split()[:2])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert is_ended(server) and is_ended(engine)


def test_a_server_that_dies_ends_the_command_with_its_code(run: Path) -> None:
    with start(run, "--port", "0") as process:
        read_until(process, "curl ")
        os.kill(int((run / "noted").read_text().split()[0]), signal.SIGKILL)
        assert any("vLLM ended with code -9" in line for line in read_until(process, "ended"))
        assert process.wait(60) == 1


def test_an_address_that_is_taken_or_open_to_others_is_refused_before_anything_is_loaded(
    run: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with start(run, "--port", port) as process:
            lines = read_until(process, "error")
            assert (process.wait(60), "pass another --port" in lines[-1]) == (1, True), lines
    with start(run, "--host", "0.0.0.0", "--port", "0", VLLM_API_KEY="") as process:
        lines = read_until(process, "error")
        assert (process.wait(60), "set VLLM_API_KEY" in lines[-1]) == (1, True), lines
    assert not (run / "noted").exists()


def test_a_key_is_passed_to_the_server_and_never_printed(run: Path) -> None:
    key = "a-key-of-clients-0123456789"
    with start(run, "--host", "0.0.0.0", "--port", "0", VLLM_API_KEY=key) as process:
        lines = read_until(process, "curl ")
        pid = int((run / "noted").read_text().split()[0])
        assert psutil.Process(pid).environ()["VLLM_API_KEY"] == key
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert lines[-1].endswith('-H "Authorization: Bearer $VLLM_API_KEY"')
    assert key not in "\n".join(lines)
