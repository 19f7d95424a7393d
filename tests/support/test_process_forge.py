"""Stand-ins: what they hand over, and what becomes of a fork with its stand-in."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.support.process_forge import ProcessForge, fork_of, lease_forge, shared_forge
from tests.support.started_process import started

WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def forge() -> ProcessForge:
    return shared_forge("json")


def test_a_forge_lasts_until_the_last_lease_on_it_is_closed() -> None:
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="forge-") as parent:
        folder = Path(parent, "f")
        forge, first = lease_forge(folder, "json", 1)
        _, second = lease_forge(folder, "json", 1)
        command = forge.python_command("-c", "import sys; print('json' in sys.modules)")
        first.close()
        for _ in range(2):
            assert subprocess.run(command, capture_output=True).stdout == b"True\n"
        second.close()
        while folder.exists():
            time.sleep(0.01)
        assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("options", [["-P"], ["-B"], ["-B", "-P"]], ids=" ".join)
def test_a_fork_has_the_arguments_the_environment_and_the_descriptors_of_its_stand_in(
    forge: ProcessForge, tmp_path: Path, options: list[str]
) -> None:
    script = (
        "import os, sys; assert 'json' in sys.modules; "
        "print(sys.argv[1], os.environ['WORD'], os.getcwd(), os.read({}, 9))"
    )
    reader, writer = os.pipe()
    os.write(writer, b"handed on")
    done = subprocess.run(
        [str(forge.interpreter), *options, "-c", script.format(reader), "argument"],
        env={**os.environ, "WORD": "word"},
        cwd=tmp_path,
        pass_fds=[reader],
        capture_output=True,
        text=True,
    )
    os.close(reader)
    os.close(writer)
    assert done.stdout == f"argument word {tmp_path} b'handed on'\n", done.stderr


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("1 / 0", 1),
    ],
)
def test_a_stand_in_ends_as_its_fork_ends(forge: ProcessForge, script: str, code: int) -> None:
    command = forge.python_command("-c", script)
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 1), (signal.SIGKILL, -9)]
)
def test_a_signal_to_a_stand_in_comes_to_its_fork(
    forge: ProcessForge, number: signal.Signals, code: int
) -> None:
    command = forge.python_command("-c", WAITING)
    with started(command, stderr=subprocess.DEVNULL) as (process, line):
        fork = psutil.Process(int(line))
        process.send_signal(number)
        assert process.wait(60) == code
        fork.wait(60)


def test_a_killed_fork_kills_its_stand_in(forge: ProcessForge) -> None:
    command = forge.python_command("-c", WAITING)
    with started(command) as (process, line):
        fork = fork_of(process.pid)
        assert int(line) == fork
        os.kill(fork, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
