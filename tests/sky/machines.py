"""Machines of the emulated cloud: copy-on-write views of this one with an address and sshd."""

import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tests.sky.box import Layout
from tests.sky.box.files import SUDO_SHIM
from tests.sky.box.layout import LOGIN, needed_by_nodes
from tests.sky.box.namespaces import delete, plug, unmount

# Limit of a machine's disk, and of its shared memory.
_DISK = "3g"
# Read by the runtime on the machine: the cloud's address is fixed in SkyPilot's code.
ENDPOINT_FILE = "etc/flotilla-cloud"
_SSHD_CONFIG = """\
Port 22
ListenAddress 0.0.0.0
HostKey /etc/ssh/machine_key
UsePAM no
PermitRootLogin prohibit-password
StrictModes no
PasswordAuthentication no
MaxSessions 200
AuthorizedKeysFile /home/ubuntu/.ssh/authorized_keys
Subsystem sftp /usr/lib/openssh/sftp-server
"""


@dataclass
class Machine:
    """One instance. It is made by `boot` and ends with `kill`, both of which may be called once."""

    layout: Layout
    name: str
    number: int
    public_key: str
    endpoint: str
    _process: subprocess.Popen[bytes] | None = None
    _killed: bool = False
    _changing: Lock = field(default_factory=Lock)

    @property
    def address(self) -> str:
        return f"{self.layout.network}.{self.number}"

    @property
    def _namespace(self) -> str:
        return f"{self.layout.prefix}-{self.name}"

    @property
    def _folder(self) -> Path:
        return self.layout.base / "machines" / self.name

    @property
    def _root(self) -> Path:
        return self._folder / "root"

    def boot(self) -> bool:
        """Boot, and return whether it runs: a machine that was killed before never does."""
        with self._changing:
            if self._killed:
                return False
            self._mount()
            self._write_image()
            login = self.layout.namespace(LOGIN)
            plug(login, self._namespace, f"m{self.number}", self.address)
            self._process = self._start()
            return True

    def kill(self) -> None:
        """Kill it as a cloud takes a machine away: at once, with everything that ran on it."""
        with self._changing:
            self._killed = True
            if self._process is None:
                return
            self._process.kill()
            self._process.wait()
            delete(self._namespace)
            unmount(self._root)
            unmount(self._folder)
            # The kernel frees the mount a moment after its last user has gone.
            for _ in range(50):
                if not self._folder.is_mount():
                    self._folder.rmdir()
                    return
                time.sleep(0.05)

    def _mount(self) -> None:
        self._folder.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(self._folder))
        upper, work = self._folder / "upper", self._folder / "work"
        for folder in (upper, work, self._root):
            folder.mkdir()
        layers = f"lowerdir=/,upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", layers, str(self._root))

    def _write_image(self) -> None:
        root = self._root
        home = root / "home/ubuntu"
        (home / ".ssh").mkdir(parents=True, exist_ok=True)
        (home / ".ssh").chmod(0o700)
        (home / ".ssh/authorized_keys").write_text(self.public_key + "\n")
        # Root under another name: sudo then has nothing to do.
        _prepend(root / "etc/passwd", "ubuntu:x:0:0::/home/ubuntu:/bin/bash\n")
        _prepend(root / "etc/shadow", "ubuntu:*:19000:0:99999:7:::\n")
        _executable(root / "usr/bin/sudo", SUDO_SHIM)
        _executable(home / ".local/bin/uv", self._uv_shim())
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        (root / "etc/hostname").write_text(f"{self.name}\n")
        (root / ENDPOINT_FILE).write_text(self.endpoint)
        (root / "etc/ssh/machine_sshd").write_text(_SSHD_CONFIG)
        key = root / "etc/ssh/machine_key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))

    def _uv_shim(self) -> str:
        """Put the runtime in place as SkyPilot's own images do, so that nothing is downloaded."""
        base = self.layout.base
        return (
            "#!/bin/bash\n"
            'if [ "$1" = venv ]; then for word in "$@"; do case "$word" in */skypilot-runtime)\n'
            f'  exec cp -a {base}/runtime-machine "$word";; esac; done; fi\n'
            f"export UV_OFFLINE=1 UV_CACHE_DIR={base}/uv-cache\n"
            "export UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy\n"
            f'exec {base}/shim/uv.real "$@"\n'
        )

    def _start(self) -> subprocess.Popen[bytes]:
        isolated = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL")
        with (self.layout.log / f"{self.name}.out").open("w") as log:
            return subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self._namespace}", *isolated),
                    *("bash", "-c", "\n".join(self._boot_script())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _boot_script(self) -> list[str]:
        root = shlex.quote(str(self._root))
        sshd = "/usr/sbin/sshd -D -f /etc/ssh/machine_sshd -E /var/log/machine_sshd.log"
        return [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /sys {root}/sys",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o size={_DISK} tmpfs {root}/dev/shm",
            f"mount -t devpts devpts {root}/dev/pts -o newinstance,ptmxmode=0666,gid=5",
            f"mount -t tmpfs tmpfs {root}/run",
            f"mkdir -p {root}/run/sshd",
            *self._elsewhere(),
            f"hostname {self.name}",
            f"exec chroot {root} {sshd}",
        ]

    def _elsewhere(self) -> list[str]:
        """The overlay shows the root file system only; needed folders may lie on others."""
        device = Path("/").stat().st_dev
        needed = [path for path in (*needed_by_nodes(), self.layout.base)]
        others = [path for path in needed if path.stat().st_dev != device]
        return [
            f"mkdir -p {self._root}{path}; mount --bind {path} {self._root}{path}"
            for path in others
        ]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _prepend(path: Path, line: str) -> None:
    path.write_text(line + path.read_text())


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
