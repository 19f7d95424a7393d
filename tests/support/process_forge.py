"""Processes that are forked from one that has loaded torch and transformers, which is most of what
the start of a training rank takes.

`python_command` of a forge is the command of a stand-in: it hands its input, output and environment
to a fork, ends as the fork ends, and takes the fork with it when it is killed. Tests of what
becomes of processes that are stopped or orphaned start real ones."""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from services.common.python_command import python_command
from tests.support.repository import ROOT

# All that a stand-in does, in a Python that starts in milliseconds.
_STAND_IN = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as forge:
    forge.connect(sys.argv[1])
    asked = json.dumps({"words": sys.argv[2:], "environment": dict(os.environ)}).encode()
    socket.send_fds(forge, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    forge.sendall(asked)
    os.close(0)
    os.close(1)
    told = forge.recv(16)
code = int(told or "1")
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class ProcessForge:
    """A process that forks for whoever connects to its socket."""

    def __init__(self, address: Path) -> None:
        self._address = address

    def python_command(self, *words: str) -> tuple[str, ...]:
        """Return a command that runs Python with these words, `-m` and a module first."""
        return (sys.executable, "-I", "-S", "-c", _STAND_IN, str(self._address), *words)


@contextmanager
def running_forge(threads: int = 1) -> Generator[ProcessForge]:
    """Yield a forge whose forks compute with so many threads."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": f"{ROOT}:{ROOT}/gen",
    }
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        address = Path(folder, "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(address))
            server.listen(16)
            command = python_command("-m", __name__, str(server.fileno()))
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[server.fileno()], env=environment
            ) as process:
                server.close()
                yield ProcessForge(address)
                process.kill()


def main() -> None:
    """Fork for each connection until stdin ends: with it the tests have ended."""
    importlib.import_module("services.learner.rank.worker")

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as server:
        while server in select.select([server, 0], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _keep_fork(connection)
            connection.close()


def _keep_fork(connection: socket.socket) -> None:
    """Fork what is asked for, tell how it ended; end it when who asked has gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "big"):
        asked += connection.recv(2**16)
    fork = os.fork()
    if fork == 0:
        connection.close()
        _become(json.loads(asked), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(fork)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(asked: dict[str, object], descriptors: list[int]) -> None:
    """Run a module as Python's `-m` does, and end."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    environment, words = asked["environment"], asked["words"]
    assert isinstance(environment, dict) and isinstance(words, list)
    os.environ.update(environment)
    sys.argv = words[1:]
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    # As at the top of any Python program.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
