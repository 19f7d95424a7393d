"""The cloud of the tests: a machine is a shell and its processes."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.repository import ROOT
from tests.support.skypilot.state import Document, Machine

# In the environment of all that runs on a machine: FOLDER:NAME.
MARK = "TEST_MACHINE"


class Cloud:
    """Machines of one folder, by the names of their clusters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def boot(self, name: str, document: Document) -> Machine:
        """Run a task's script on a new machine."""
        environment = {
            **os.environ,
            **{name: value or "" for name, value in document.get("secrets", {}).items()},
            "SKYPILOT_NODE_IPS": "127.0.0.1",
            "PYTHONPATH": f"{ROOT}:{ROOT}/gen",
            MARK: f"{self._folder}:{name}",
            "TMPDIR": str(self._home(name)),
        }
        code = self._code(name)
        code.unlink(missing_ok=True)
        # Each machine has a disk of its own.
        work = self._home(name) / "workdir"
        subprocess.run(("cp", "-r", document["workdir"], str(work)), check=True)
        with (self._home(name) / "output").open("ab") as output:
            process = subprocess.Popen(
                (
                    "bash",
                    "-c",
                    f"({document['run']}\n); echo $? > {code}.new; mv {code}.new {code}",
                ),
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Machine(time.time(), process.pid)

    def look(self, name: str, machine: Machine) -> int | None:
        """The exit code of a machine's program, once that has ended."""
        code = self._code(name)
        if machine.code is not None or not machine.pid or not code.exists():
            return machine.code
        return int(code.read_text())

    def signal(self, name: str, machine: Machine) -> None:
        """SIGTERM to all but the shell, as a scheduler that wants the machine back."""
        for process in self._processes(name):
            with suppress(psutil.Error):
                if process.pid != machine.pid and process.name() != "bash":
                    process.send_signal(signal.SIGTERM)

    def terminate(self, name: str, machine: Machine) -> None:
        """Take the machine away: everything on it is gone."""
        if not machine.pid:
            return
        for process in self._processes(name):
            with suppress(psutil.Error):
                process.kill()
        # A child of this server is to be waited for, one of an earlier server is not.
        with suppress(ChildProcessError):
            os.waitpid(machine.pid, 0)

    def _processes(self, name: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == f"{self._folder}:{name}":
                    found.append(process)
        return found

    def _home(self, name: str) -> Path:
        home = self._folder / "machines" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _code(self, name: str) -> Path:
        return self._home(name) / "code"
