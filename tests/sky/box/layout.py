"""The parts of a box and the places of its files."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The login host: it also runs the controller, SkyPilot's API server, the emulator and the tests.
LOGIN = "ctl"


def _number() -> int:
    """The number of this box on this machine: boxes of other numbers share nothing with it."""
    return int(os.environ.get("FLOTILLA_SKY_BOX", "0"))


def _own(name: str) -> str:
    number = _number()
    return f"{name}{number}" if number else name


def _base() -> Path:
    # Short, because paths of sockets may have 108 characters, and readable for the nodes' user.
    return Path(os.environ.get("FLOTILLA_SKY_BASE", _own("/var/tmp/flotilla-sky")))


@dataclass(frozen=True)
class Layout:
    """One box. Two on one machine need another `base`, `user`, `prefix`, `network` and `api_port`;
    FLOTILLA_SKY_BOX=1 gives a second box all of these."""

    base: Path = field(default_factory=_base)
    # The ordinary user that every daemon and every job runs as.
    user: str = field(default_factory=lambda: _own("flotilla-node"))
    prefix: str = field(default_factory=lambda: _own("flo"))
    network: str = field(default_factory=lambda: f"10.88.{_number()}")
    # SkyPilot's API server is stopped by its port, in any network namespace.
    api_port: int = field(default_factory=lambda: 46580 + _number())
    cluster: str = "mini"
    gpu_nodes: int = 3
    cpu_nodes: int = 2
    # A node's size in Slurm's configuration; nothing is measured or enforced.
    cpus: int = 4
    memory_mb: int = 16000
    gpu: str = "h100"
    gpus: int = 2
    # Without them there is Slurm only: SkyPilot would download packages for its nodes.
    runtimes: bool = True

    @property
    def nodes(self) -> list[str]:
        """Return the nodes, those with GPUs first."""
        return [f"{self.cluster}{number}" for number in range(1, self.count + 1)]

    @property
    def count(self) -> int:
        return self.gpu_nodes + self.cpu_nodes

    @property
    def hosts(self) -> list[str]:
        return [LOGIN, *self.nodes]

    def address(self, host: str) -> str:
        """The IPv4 address of a host of the box."""
        last = 1 if host == LOGIN else 11 + self.nodes.index(host)
        return f"{self.network}.{last}"

    def namespace(self, host: str) -> str:
        """The name of the network namespace that is this host."""
        return f"{self.prefix}-{host}"

    @property
    def conf(self) -> Path:
        return self.base / "conf"

    @property
    def slurm_conf(self) -> Path:
        return self.conf / "slurm.conf"

    @property
    def log(self) -> Path:
        return self.base / "log"

    @property
    def run(self) -> Path:
        return self.base / "run"

    @property
    def shim(self) -> Path:
        """Comes first in the PATH of every node."""
        return self.base / "shim"

    @property
    def ssh(self) -> Path:
        return self.base / "ssh"

    @property
    def home(self) -> Path:
        """The home of the nodes' user, shared by all nodes as Slurm clusters do."""
        return self.base / "home"

    @property
    def shared(self) -> Path:
        """A folder that nodes and tests may write: where runs upload to."""
        return self.base / "shared"

    @property
    def node_tmp(self) -> Path:
        """Each node sees a folder of its own here."""
        return self.base / "ntmp"

    @property
    def client(self) -> Path:
        """The home of SkyPilot's client and API server."""
        return self.base / "client"

    @property
    def path(self) -> str:
        return f"{self.shim}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


# What the nodes run services with: the project's environment with torch and vLLM.
SERVICES_PYTHON = ROOT / ".venv/bin/python"


def needed_by_nodes() -> list[Path]:
    """Paths outside a box that must be readable inside it, even below a private home."""
    pythons = [Path(sys.executable), SERVICES_PYTHON]
    prefixes = {path.resolve().parents[1] for path in pythons if path.exists()}
    return sorted({ROOT, *prefixes})
