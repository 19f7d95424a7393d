"""`flotilla train` reports an environment that cannot work before it starts anything else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher.doctor import own_environment
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

SLEEPER = "import time\ntime.sleep(600)\n"


def cli(*words: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "flotilla_launcher.cli.app", *map(str, words)]


def elsewhere(path: Path) -> Path:
    """Put the tasks into an environment that does not exist."""
    tasks = path.parent / "tasks.json"
    tasks.write_text(tasks.read_text().replace('"library"', '"teleporter"'))
    path.write_text(path.read_text().replace('backend = "mcp"', 'backend = "embedded"'))
    return path


def broken(kind: str, policy: Path, folder: Path) -> tuple[Path, str]:
    """A spec, and the error reported for it."""
    match kind:
        case "unlisted":
            path = own_environment.write(folder, policy, listed=False)
            return path, "runs only in a sandbox, and bubblewrap is not installed here"
        case "syntax":
            path = own_environment.write(folder, policy, verifier="def lent(env:\n    return 1\n")
            return path, "of 'lend-0', the verifier does not compile: '(' was never closed"
        case "unknown":
            path = elsewhere(own_environment.write(folder, policy))
            return path, "backend 'embedded' has no environment 'teleporter'"
        case _:
            path = own_environment.write(folder, policy, backend='url = "http://127.0.0.1:9/mcp"')
            return path, "http://127.0.0.1:9/mcp cannot be reached: Connection refused; start the"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unlisted", "syntax", "unknown", "down"])
def test_an_environment_that_cannot_work_is_named_by_train_in_15_s_before_anything_starts(
    kind: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_environment.hide_bubblewrap(monkeypatch)
    path, words = broken(kind, policy, tmp_path / "own")
    runs, began = tmp_path / "runs", time.monotonic()
    done = subprocess.run(
        cli("train", path, "--runs", runs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    took = time.monotonic() - began
    print(f"{kind}: {took:.1f} s at a load of {os.getloadavg()[0]:.1f}")
    assert done.returncode == 1
    assert words in done.stdout, done.stdout
    assert not list(runs.glob("*/logs/*")), "no service was started"
    assert took < 15.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.slow
def test_an_interrupt_while_an_episode_opens_leaves_no_process(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy)
    (tmp_path / "server.py").write_text(SLEEPER)
    skip = ["versions", "memory", "disk", "tokenizer", "dataset"]
    words = [word for name in skip for word in ("--skip", name)]
    command = cli("doctor", path, "--runs", tmp_path / "runs", *words)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    # The episode is being opened.
    wait_until(lambda: servers(tmp_path))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert not servers(tmp_path)


def servers(folder: Path) -> list[int]:
    """Processes of the server in this folder."""
    found: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        cmdline: list[str] = process.info["cmdline"] or []
        if f"{folder}/server.py" in cmdline and "tied_child.py" not in json.dumps(cmdline):
            found.append(process.pid)
    return found
