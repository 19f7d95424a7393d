"""Starts a box, shows its state, and stops it without leaving anything."""

import fcntl
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from tests.sky.box import files, namespaces
from tests.sky.box.layout import LOGIN, Layout, needed_by_nodes
from tests.sky.box.prepare import BoxError, prepare, require

__all__ = ["Box", "BoxError", "Left"]

_START_S = 30.0
_GRACE_S = 5.0
# Below /dev/shm every process of a user may leave memory.
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Left:
    """The remains of a box on this machine; falsy when there are none."""

    processes: list[str]
    namespaces: list[str]
    mounts: list[str]
    shared_memory: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.namespaces or self.mounts or self.shared_memory)


class Box:
    """A Slurm cluster whose nodes are namespaces of this machine."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Prepare what is missing, clear what a killed session has left, and start."""
        require()
        if self._lock is None:
            self._take_lock()
        prepare(self.layout)
        self._sweep()
        self._write_files()
        namespaces.connect(self.layout)
        self._spawn(LOGIN, "munged", *self._munged())
        self.until("munged", (self.layout.run / "munge.sock").exists)
        self._spawn(LOGIN, "slurmctld", "/usr/sbin/slurmctld", "-D", "-c")
        for node in self.layout.nodes:
            self._start_node(node)
        self.until("slurm", self._all_idle)

    def stop(self) -> None:
        """End everything that runs in the box; raise if anything is left, or if the box is that
        of another process that lives."""
        require()
        if self._lock is None:
            self._take_lock()
        if namespaces.existing(self.layout.prefix):
            self.slurm("scancel", "--user", self.layout.user, check=False)
        self._sweep()
        for daemon in self._daemons:
            daemon.wait()
        self._daemons = []
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if left := self.left():
            raise BoxError(f"the box has left {left}")

    def left(self) -> Left:
        """Return the current remains of this box, running or left behind."""
        pids = sorted(self._processes())
        user = self._uid()
        memory = [path for path in _SHARED_MEMORY.iterdir() if path.lstat().st_uid == user]
        return Left(
            processes=[f"{pid} {_command(pid)}" for pid in pids],
            namespaces=namespaces.existing(self.layout.prefix),
            mounts=[str(point) for point in namespaces.mounts_below(self.layout.base)],
            shared_memory=[str(path) for path in memory],
        )

    def command(self, host: str, *command: str) -> list[str]:
        """The argv that runs a command on a host as the nodes' user."""
        return [*files.enter(self.layout, host), *command]

    def slurm(self, *command: str, check: bool = True) -> str:
        """Return the output of a Slurm command on the login host."""
        done = subprocess.run(
            self.command(LOGIN, *command), check=False, capture_output=True, text=True
        )
        if check and done.returncode:
            raise BoxError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> list[str]:
        """Names of the jobs that Slurm has not ended."""
        return self.slurm("squeue", "--noheader", "--format=%j").split()

    def kill_node(self, node: str) -> None:
        """Fail a machine: everything on it dies at once, and Slurm marks it as down."""
        pids = namespaces.processes_in([self.layout.namespace(node)])
        namespaces.kill(pids, grace_s=0)
        # Slurm itself would notice after minutes.
        self.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def revive_node(self, node: str) -> None:
        """A killed node boots again, empty."""
        self._start_node(node)
        self.until(node, lambda: self._states([node]) == {"idle"})

    def _take_lock(self) -> None:
        self.layout.base.mkdir(parents=True, exist_ok=True)
        lock = (self.layout.base / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise BoxError(f"another process has the box in {self.layout.base}") from None
        self._lock = lock

    def _write_files(self) -> None:
        layout = self.layout
        for folder in ("conf", "log", "run", "state", "spool", "home", "ntmp", "ssh", "shared"):
            (layout.base / folder).mkdir(exist_ok=True)
        for name in ("conf", "ssh", "home", "shared"):
            (layout.base / name).chmod(0o755)
        for host in layout.hosts:
            self._make_host_folders(host)
        stage = layout.run / "stage"
        stage.mkdir(exist_ok=True)
        exposed = files.expose(needed_by_nodes(), stage)
        _write(layout.conf / "hosts", files.hosts(layout))
        _write(layout.slurm_conf, files.slurm_conf(layout))
        _write(layout.conf / "gres.conf", files.gres_conf(layout))
        _write(layout.conf / "prolog.sh", files.prolog(layout), executable=True)
        _write(layout.conf / "host.sh", files.host_script(layout, exposed), executable=True)
        _write(layout.shim / "uv", files.uv_shim(layout), executable=True)
        _write(layout.shim / "sudo", files.SUDO_SHIM, executable=True)
        _write(layout.home / ".profile", files.profile(layout))
        self._write_keys()
        owned = ("log", "run", "state", "spool", "home", "ntmp", "shared")
        folders = [str(layout.base / name) for name in owned]
        hosts = [str(layout.base / "tmp-of" / host) for host in layout.hosts]
        key = str(layout.conf / "munge.key")
        subprocess.run(["chown", "-R", f"{layout.user}:", *folders, key], check=True)
        subprocess.run(["chown", f"{layout.user}:", *hosts], check=True)

    def _make_host_folders(self, host: str) -> None:
        base = self.layout.base
        folder = base / "tmp-of" / host
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (base / "spool" / host).mkdir(exist_ok=True)
        if host != LOGIN and self.layout.runtimes:
            copied = [str(base / "runtime-slurm"), str(folder / ".runtime")]
            subprocess.run(["cp", "-al", *copied], check=True)

    def _write_keys(self) -> None:
        layout = self.layout
        munge = layout.conf / "munge.key"
        munge.unlink(missing_ok=True)
        munge.write_bytes(os.urandom(128))
        munge.chmod(0o600)
        for name in ("host", "client"):
            if not (layout.ssh / name).exists():
                key = ["-t", "ed25519", "-N", "", "-f", str(layout.ssh / name)]
                subprocess.run(["ssh-keygen", "-q", *key], check=True)
        _write(layout.ssh / "sshd_config", files.sshd_config(layout))
        _write(layout.ssh / "login.sh", files.login(layout), executable=True)
        # sshd insists on the folder that its package's service file makes.
        Path("/run/sshd").mkdir(exist_ok=True)

    def _munged(self) -> list[str]:
        layout = self.layout
        return [
            *("/usr/sbin/munged", "--foreground", f"--key-file={layout.conf}/munge.key"),
            *(f"--socket={layout.run}/munge.sock", f"--pid-file={layout.run}/munged.pid"),
            *(f"--log-file={layout.log}/munged.log", f"--seed-file={layout.base}/state/seed"),
        ]

    def _start_node(self, node: str) -> None:
        self._spawn(node, f"slurmd.{node}", "/usr/sbin/slurmd", "-D", "-c", "-N", node)

    def _spawn(self, host: str, name: str, *command: str) -> None:
        with (self.layout.log / f"{name}.out").open("a") as log:
            daemon = subprocess.Popen(
                self.command(host, *command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _all_idle(self) -> bool:
        return self._states(self.layout.nodes) == {"idle"}

    def _states(self, nodes: Iterable[str]) -> set[str]:
        options = ("--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%t")
        return set(self.slurm("sinfo", *options, check=False).split())

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait for something that comes within seconds."""
        deadline = time.monotonic() + _START_S
        while not reached():
            if time.monotonic() > deadline:
                raise BoxError(f"{what} did not come up in {_START_S:.0f} s: see {self.layout.log}")
            time.sleep(0.1)

    def _processes(self) -> set[int]:
        inside = namespaces.processes_in(namespaces.existing(self.layout.prefix))
        user = self._uid()
        return inside if user is None else inside | namespaces.processes_of(user)

    def _uid(self) -> int | None:
        with suppress(KeyError):
            return pwd.getpwnam(self.layout.user).pw_uid
        return None

    def _sweep(self) -> None:
        namespaces.kill(self._processes(), _GRACE_S)
        # The last child of a killed process may only now be visible.
        namespaces.kill(self._processes(), grace_s=0)
        for name in namespaces.existing(self.layout.prefix):
            namespaces.delete(name)
        for point in namespaces.mounts_below(self.layout.base):
            namespaces.unmount(point)
        for folder in (self.layout.base / "machines").glob("*"):
            # Always empty: a machine's files went with its mounts.
            folder.rmdir()
        user = self._uid()
        for path in _SHARED_MEMORY.iterdir():
            if path.lstat().st_uid == user:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.layout.run / "munge.sock").unlink(missing_ok=True)


def _write(path: Path, text: str, executable: bool = False) -> None:
    # A running script cannot be overwritten, but it can be replaced.
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)


def _command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "(ended)"
