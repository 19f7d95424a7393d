"""Processes that are forked from one that has imported what they need, which is most of what their
start takes: torch and transformers for a training rank.

`python_command` of a forge is the command of a stand-in: it hands its descriptors and environment
to a fork, passes SIGINT and SIGTERM on, ends as the fork ends, and takes the fork with it when it
is killed. SIGSTOP is for the fork itself (`fork_of`). Tests of what becomes of orphaned processes
start real ones."""

import atexit
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from flotilla_common.process.python_command import python_command
from tests.support.repository import ROOT

_STAND_IN = Path(__file__).with_name("stand_in.py")
_MOST_DESCRIPTORS = 16
_LEASES = "leases"
# Only modules and scripts in the command line come from a fork. multiprocessing passes -B on.
_INTERPRETER = """#!/bin/sh
if [ "$1" = -B ]; then
    export PYTHONDONTWRITEBYTECODE=1
    shift
fi
case "$1 $2" in
"-m "* | "-c "* | "-P -m" | "-P -c") exec {} "$@" ;;
esac
exec {} "$@"
"""


class ProcessForge:
    """A process that forks for each client of its socket."""

    def __init__(self, address: Path) -> None:
        self.address = address

    def python_command(self, *words: str) -> tuple[str, ...]:
        """Return a command that runs Python with these words: `-m` and a module, or `-c` and a
        script, first."""
        return (sys.executable, "-I", "-S", str(_STAND_IN), str(self.address), *words)

    @property
    def interpreter(self) -> Path:
        """Return a program that is such a Python for modules and scripts in its arguments, and a
        plain one for anything else; it lasts as long as the forge."""
        return self.address.with_name("python")


def fork_of(stand_in: int) -> int:
    """Return the pid of the fork that a process stands in for."""
    while True:
        word, _, pid = Path(f"/proc/{stand_in}/comm").read_text().partition(" ")
        if word == "fork":
            return int(pid)
        # It is about to request one.
        time.sleep(0.01)


@cache
def shared_forge(module: str, threads: int = 1) -> ProcessForge:
    """Return the forge that has imported this module, and whose forks compute with so many threads.

    The first worker of pytest-xdist that needs it starts it; it ends with the last that uses it."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    # The path of a socket is short.
    name = hashlib.sha256(f"{session} {module}".encode()).hexdigest()[:16]
    forge, lease = lease_forge(Path(tempfile.gettempdir(), f"forge-{name}"), module, threads)
    atexit.register(lease.close)
    return forge


def lease_forge(folder: Path, module: str, threads: int) -> tuple[ProcessForge, socket.socket]:
    """Return the forge of this folder, started if there is none, and a lease on it: it ends once
    the last lease is closed, and removes its folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    forge, lease = ProcessForge(folder / "socket"), socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not forge.address.exists():
            _start_forge(forge, module, threads)
        lease.connect(str(folder / _LEASES))
    return forge, lease


def _start_forge(forge: ProcessForge, module: str, threads: int) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": f"{ROOT}:{ROOT}/gen",
    }
    forge.interpreter.write_text(
        _INTERPRETER.format(shlex.join(forge.python_command()), shlex.quote(sys.executable))
    )
    forge.interpreter.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as leases:
        for each, path in ((leases, forge.address.with_name(_LEASES)), (server, forge.address)):
            each.bind(str(path))
            each.listen(16)
        numbers = (server.fileno(), leases.fileno())
        command = python_command("-m", __name__, *map(str, numbers), module)
        subprocess.run(
            command, stdin=subprocess.DEVNULL, pass_fds=numbers, env=environment, check=True
        )


def fork_children() -> None:
    """Make what the forks start with their own interpreter forks as well; call it from the module
    that a forge imports."""
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as server:
        sys.executable = str(ProcessForge(Path(server.getsockname())).interpreter)


def main() -> None:
    """Fork for each connection until all leases are closed: then the tests have ended."""
    if os.fork():
        # The worker that has started it may end first.
        return
    importlib.import_module(sys.argv[3])

    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with (
        socket.socket(fileno=int(sys.argv[1])) as server,
        socket.socket(fileno=int(sys.argv[2])) as leases,
    ):
        held = [leases.accept()[0]]
        while held:
            for ready in select.select([server, leases, *held], [], [])[0]:
                if ready is server:
                    _fork_keeper(server)
                elif ready is leases:
                    held.append(leases.accept()[0])
                else:
                    held.remove(ready)
                    ready.close()
        shutil.rmtree(Path(server.getsockname()).parent)


def _fork_keeper(server: socket.socket) -> None:
    connection, _ = server.accept()
    if os.fork() == 0:
        server.close()
        _keep_fork(connection)
    connection.close()


def _reap(_number: int, _frame: FrameType | None) -> None:
    """Wait for the keepers that have ended: the time that they took counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep_fork(connection: socket.socket) -> None:
    """Fork the requested process, pass on the signals that the client sends, and report its end;
    end it when the client has gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
    left, requests = int.from_bytes(size, "big"), b""
    while len(requests) < left:
        # What follows are signals.
        requests += connection.recv(left - len(requests))
    fork = os.fork()
    if fork == 0:
        connection.close()
        _become(json.loads(requests), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(BrokenPipeError):
        connection.send(fork.to_bytes(4, "big"))
    ended = os.pidfd_open(fork)
    while ended not in select.select([connection, ended], [], [])[0]:
        if not (signals := connection.recv(16)):
            os.kill(fork, signal.SIGKILL)
            break
        for number in signals:
            os.kill(fork, number)
    _, status = os.waitpid(fork, 0)
    with suppress(BrokenPipeError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(requests: dict[str, Any], descriptors: list[int]) -> None:
    """Run Python with the words of the request, and end."""
    _number_descriptors(requests["descriptors"], descriptors)
    os.environ.clear()
    os.environ.update(requests["environment"])
    os.chdir(requests["folder"])
    searched = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [each for each in searched if each not in sys.path]
    code = _run_words(requests["words"])
    sys.stdout.flush()
    os._exit(code)


def _number_descriptors(numbers: list[int], descriptors: list[int]) -> None:
    """Give the received descriptors the numbers that they have in the client."""
    # Out of the way of all these numbers first.
    free = 1 + max(*numbers, *descriptors)
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in descriptors]
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in set(descriptors) - set(numbers):
        os.close(descriptor)


def _run_words(words: list[str]) -> int:
    """Run a module or a script, `-m` or `-c`, perhaps after `-P`; return the exit code that Python
    would end with."""
    how, what, *arguments = words[1:] if words[0] == "-P" else words
    sys.argv = [what if how == "-m" else "-c", *arguments]
    try:
        if how == "-m":
            _run_module(what)
        else:
            exec(compile(what, "<string>", "exec"), vars(_make_main()))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    # Like at the top of any Python program.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def _run_module(name: str) -> None:
    # It may be loaded, but not as the main module.
    main = f"{name}.__main__"
    sys.modules.pop(main if main in sys.modules else name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _make_main() -> ModuleType:
    """Return an empty main module."""
    sys.modules["__main__"] = made = ModuleType("__main__")
    return made


if __name__ == "__main__":
    main()
