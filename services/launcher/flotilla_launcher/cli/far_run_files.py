"""Where the files of a run are that are not on this machine: on one that `ssh` reaches, or in its
store.

A run on rented machines has its files on its learner's machine, which is reached from the
launcher's."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.text.parsing import as_object
from flotilla_launcher.backends.sky.machine_script import OWN_CODE, RUNS_FOLDER
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.config.launcher import parse_launcher
from flotilla_launcher.security.launcher_address import LauncherAddress
from flotilla_launcher.state import LEARNER

# With these `ssh` finds the user's keys.
SSH_VARIABLES = ("SSH_AUTH_SOCK", "SSH_AGENT_PID")
# Where SkyPilot puts the code on a machine.
_MACHINE_FOLDER = "~/sky_workdir"
_SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "20",
    "ExitOnForwardFailure": "yes",
    "ServerAliveInterval": "20",
}


class NoFilesError(CommandError):
    """Raised when a run's files cannot be read from here; the message names what can be done."""


@dataclass(frozen=True, slots=True)
class FarFiles:
    """Files of a run on another machine: below `runs`, where `python` runs our programs.

    `launcher` is the launcher's address if it is on another machine, and `cluster` SkyPilot's name
    of the learner's machine, empty if the files are the launcher's own."""

    run_id: str
    runs: str
    python: str
    launcher: LauncherAddress | None = None
    cluster: str = ""

    @property
    def host(self) -> str:
        """Host of the launcher; empty for this machine."""
        return split_host_port(self.launcher.address, "launcher")[0] if self.launcher else ""

    @property
    def advice(self) -> str:
        """What the user can run where the launcher is."""
        folder = f" in {self.launcher.folder}" if self.launcher and self.launcher.folder else ""
        where = f" on {self.host}{folder}" if self.host else f" after `ssh {self.cluster}`"
        return f"run `flotilla inspect {self.run_id}`{where}"

    def program(self, module: str, *arguments: str) -> str:
        """Return the line of shell that runs a program for readers of this run."""
        run = ("--runs", self.runs, "--run", self.run_id)
        return shlex.join(python_command("-m", module, *run, *arguments, executable=self.python))

    def command(self, shell: str, port: int | None = None) -> list[str]:
        """Return the command that runs a line of shell where the files are. Connections to the
        loopback `port` of this machine arrive at that one there. Raises NoFilesError."""
        if shutil.which("ssh") is None:
            raise NoFilesError(
                f"the files of run {self.run_id} need `ssh`: install it, or {self.advice}"
            )
        if self.launcher is not None and not self.launcher.folder:
            raise NoFilesError(f"the launcher's version does not say where it is: {self.advice}")
        if self.cluster:
            there = f"cd {_MACHINE_FOLDER} && {OWN_CODE} && {shell}"
            python = self.launcher.python if self.launcher else sys.executable
            # It writes the entry of the cluster for ssh.
            entry = (str(PurePosixPath(python).with_name("sky")), "status", self.cluster)
            shell = (
                f"{shlex.join(entry)} > /dev/null && {shlex.join(_ssh(self.cluster, there, port))}"
            )
        if self.launcher is None:
            return ["sh", "-c", shell]
        return _ssh(self.host, f"cd {shlex.quote(self.launcher.folder)} && {shell}", port)


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Files of a run in the store that its `spec` names."""

    url: str
    spec: dict[str, Any]


def find_files(run: pb.Run, launcher: LauncherAddress | None) -> FarFiles | StoredFiles:
    """Return where the files of a run are that are not on this machine. `launcher` is its
    launcher's address if that is on another machine. Raises NoFilesError."""
    if run.backend == "local" and launcher is not None:
        runs = str(PurePosixPath(run.directory).parent)
        return FarFiles(run.run_id, runs, launcher.python, launcher)
    spec = as_object(json.loads(run.spec_json))
    learner = next((r for r in run.replicas if (r.service, r.replica) == (LEARNER, 0)), None)
    if learner is not None and learner.state in ("running", "draining"):
        python = parse_launcher(spec).sky.python
        return FarFiles(run.run_id, RUNS_FOLDER, python, launcher, learner.machine)
    checkpoint = as_object(as_object(spec.get("learner")).get("checkpoint"))
    if remote := checkpoint.get("remote"):
        return StoredFiles(f"{str(remote).rstrip('/')}/{run.run_id}", spec)
    raise NoFilesError(
        f"the files of run {run.run_id} are on its learner's machine, which is not running, and"
        " learner.checkpoint.remote names no store that has them:"
        f" `flotilla logs {run.run_id}` prints what its services wrote"
    )


def _ssh(host: str, shell: str, port: int | None) -> list[str]:
    options = [word for name, value in _SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    forwarded = [] if port is None else ["-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    return ["ssh", "-T", *options, *forwarded, host, shell]
