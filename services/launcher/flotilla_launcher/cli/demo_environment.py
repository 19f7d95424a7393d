"""The Python environment that `flotilla demo` makes for itself: vLLM for a CPU, torch, and all of
Flotilla's services, pinned as in a checkout."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.own_version import own_version
from flotilla_common.process.python_command import python_command
from flotilla_launcher.cli.shipped_files import find_shipped
from flotilla_launcher.cli.terminal import CommandError

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PYPI = "https://pypi.org/simple"
_DISTRIBUTIONS = (
    *("protos", "common", "reading", "rollout", "learner", "env-gateway", "launcher"),
    "environments",
)
# The pinned wheels are of this Python.
_PYTHON = (3, 11)
_STAMP = ".installed"
# The pinned wheels for x86-64, and what they become.
_SIZE = "1.1 GB to download, 4 GB on disk"
_INDEX = re.compile(r"^(install|global)\.index-url='([^']+)'$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """An environment in a folder of its own: made as a whole, or not there."""

    folder: Path

    @classmethod
    def of_user(cls) -> "DemoEnvironment":
        """Return the user's environment for this version of Flotilla, made or not."""
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return cls(Path(data).expanduser() / "flotilla" / f"demo-{own_version().version}")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_running(self) -> bool:
        """Whether this very process runs in it."""
        return Path(sys.prefix).resolve() == self.folder.resolve()

    @property
    def is_made(self) -> bool:
        """Whether it is complete, and has what this Flotilla pins."""
        stamp = self.folder / _STAMP
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest_of_pins()

    def make(self) -> None:
        """Install everything anew; after an error or Ctrl-C nothing of it is left. Raises
        CommandError."""
        python = _find_python()
        with self._locked():
            if self.is_made:
                return
            try:
                _run(python_command("-m", "venv", "--clear", str(self.folder), executable=python))
                self._install()
                replace_file(self.folder / _STAMP, _digest_of_pins().encode())
            except BaseException:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise

    def _install(self) -> None:
        pip = python_command(
            "-m", "pip", "--disable-pip-version-check", executable=str(self.python)
        )
        pinned = (*pip, "install", "--no-deps", "--require-hashes", "-r")
        torch, others = map(str, _pins())
        # pip's configured index first: an index that cannot be reached costs minutes.
        if not _succeeds((*pinned, torch), stderr=subprocess.DEVNULL):
            _run((*pinned, torch, "--index-url", TORCH_CPU_INDEX))
        _run((*pinned, others))
        version = own_version().version
        ours = [f"flotilla-rl-{name}=={version}" for name in _DISTRIBUTIONS]
        _run((*pip, "install", "--no-deps", *ours))

    @contextmanager
    def _locked(self) -> Generator[None]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.folder.name}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(
                    f"another `flotilla demo` is making {self.folder}: try again once it is done"
                ) from error
            yield


def describe_installation(environment: DemoEnvironment, missing: Sequence[str]) -> str:
    """Describe for the user what `make` would install, how large it is, and where it is from."""
    return (
        f"The demo needs vLLM for a CPU, torch and Flotilla's services; here, {', '.join(missing)}"
        " cannot be imported.\n"
        f"It installs them into an environment of its own, {environment.folder}: {_SIZE}. Nothing"
        " else changes, and whoever deletes that folder is rid of it.\n"
        f"The packages are from {_find_index()}; torch from there or, failing that, from"
        f" {TORCH_CPU_INDEX}. All but Flotilla's own are pinned by hash."
    )


def _pins() -> tuple[Path, Path]:
    return find_shipped("requirements/torch-cpu.txt"), find_shipped("requirements/cpu.txt")


def _digest_of_pins() -> str:
    texts = [path.read_bytes() for path in _pins()]
    return hashlib.sha256(b"".join((*texts, str(own_version()).encode()))).hexdigest()


def _find_python() -> str:
    """Return an interpreter of the Python that the packages are pinned for. Raises CommandError."""
    name = "python{}.{}".format(*_PYTHON)
    found = sys.executable if sys.version_info[:2] == _PYTHON else shutil.which(name)
    if found is None:
        own = "{}.{}".format(*sys.version_info)
        raise CommandError(
            f"the demo's packages are pinned for {name}, and this is Python {own}: install {name}"
        )
    return found


def _find_index() -> str:
    """Return the package index that pip is configured with, without what may be a password."""
    done = subprocess.run(
        python_command("-m", "pip", "config", "list"),
        capture_output=True,
        text=True,
        check=False,
        env=child_environment("PIP_*"),
    )
    configured: dict[str, str] = dict(_INDEX.findall(done.stdout))
    # pip may be missing here, and in the new environment read its variable all the same.
    given = (os.getenv("PIP_INDEX_URL"), *map(configured.get, ("install", "global")))
    url = urlsplit(next(filter(None, given), _PYPI))
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()


def _succeeds(command: Sequence[str], *, stderr: int | None = None) -> bool:
    # With pip's variables, which may name an index with a password.
    environment = child_environment("PIP_*")
    return subprocess.run(command, check=False, stderr=stderr, env=environment).returncode == 0


def _run(command: Sequence[str]) -> None:
    if not _succeeds(command):
        raise CommandError(f"`{' '.join(command)}` failed, for the reason above; nothing is left")
