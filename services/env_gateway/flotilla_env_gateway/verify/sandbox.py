"""Command lines of verifier processes: plain, with packages, or in a sandbox by bubblewrap.

The sandbox has a read-only file system with the files that Python needs and no more: no
home, no /etc, no /proc, no /dev, nothing writable. It has its own user, no network, and no
environment."""

import itertools
import json
import os
import platform
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import flotilla_env_gateway
from flotilla_common.process.python_command import python_command, tied_command
from flotilla_env_gateway.verify import cgroup, seccomp
from flotilla_env_gateway.verify.cgroup import ControlGroups
from flotilla_env_gateway.verify.verifier_process import FILTER, INFO, ProcessCommand, StartError

_MODULES = Path("flotilla_env_gateway/verify")
_ROOT = Path(flotilla_env_gateway.__path__[0]).parent
_CODE = _ROOT / _MODULES
_INSIDE = "/verifier"
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from flotilla_env_gateway.verify.worker import main; main()"
)
# Flotilla's own folder is searched no longer: a user's package may be called as one in it.
_PACKAGES_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from flotilla_env_gateway.verify.worker import main; del sys.path[0]; main()"
)
# Importing a package with torch takes long on a busy machine.
_PACKAGES_START_S = 120.0
# Isolated from the environment, from site packages and from the directory it starts in.
_PYTHON = ("-I", "-S", "-B", "-X", "utf8", "-c", _BOOT)
# Prefixes that Python shares with everything else.
_SHARED = (Path("/usr"), Path("/usr/local"))
_DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
# Settings that forbid user namespaces, with the value by which they do.
_FORBIDDING = {
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
    "user.max_user_namespaces": "0",
}
_UNPRIVILEGED = "65534"
# Users of the sandboxes of a gateway that is root: no account has these numbers, and they exist
# even in a container whose numbers end at 65535.
_USERS = range(64_000, 65_000)
_NEXT_USER: Iterator[int] = itertools.cycle(_USERS)


def plain_command(memory_bytes: int) -> ProcessCommand:
    """Return the command of a process without a sandbox, for trusted verifiers in Python alone."""
    limits = (str(memory_bytes), "0")
    return ProcessCommand((sys.executable, *_PYTHON, str(_ROOT), *limits))


def packages_command(
    memory_bytes: int, modules: Sequence[tuple[str, str, str]] = ()
) -> ProcessCommand:
    """Return the command of a process for functions of `modules`, each (folder, module, SHA-256):
    with the packages and the working directory of this process, and none of its secrets."""
    words = (_PACKAGES_BOOT, str(_ROOT), str(memory_bytes), "0", json.dumps(modules))
    return ProcessCommand(
        tied_command(signal.SIGKILL, *python_command("-X", "utf8", "-c", *words)),
        environ=os.environ,
        folder=os.getcwd(),
        start_s=_PACKAGES_START_S,
    )


class Sandbox:
    """Command lines for processes that run one verifier each."""

    def __init__(
        self, bwrap: str, *, memory_bytes: int, cpu_s: int, groups: ControlGroups | None = None
    ) -> None:
        self._bwrap = bwrap
        self._limits = (str(memory_bytes), str(cpu_s))
        self._filter = seccomp.build_program()
        self._groups = groups

    @classmethod
    def find_installed(cls, *, memory_bytes: int, cpu_s: int) -> "Sandbox | None":
        """Return a sandbox, or None if bubblewrap is not installed."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return None
        groups = ControlGroups.find_usable(memory_bytes)
        return cls(bwrap, memory_bytes=memory_bytes, cpu_s=cpu_s, groups=groups)

    @property
    def limits(self) -> list[str]:
        """A verifier's bounds, for people: its process's own limits, and those of its group."""
        return ["rlimits", *(self._groups.limits if self._groups else ())]

    def make_command(self) -> ProcessCommand:
        """Return the command of one sandboxed process. Raises StartError if system calls
        cannot be filtered: namespaces alone do not close every way out of a sandbox."""
        if self._filter is None:
            raise StartError(f"there is no filter of system calls for {platform.machine()}")
        python = os.path.realpath(sys.executable)
        inner = (
            *(self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns"),
            *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "verifier"),
            *("--uid", _UNPRIVILEGED, "--gid", _UNPRIVILEGED),
            *_file_system(python, code_at=f"{_INSIDE}/{_MODULES}"),
            *("--chdir", "/", "--remount-ro", "/"),
            *("--seccomp", FILTER, "--", python, *_PYTHON, _INSIDE, *self._limits),
        )
        if os.geteuid() == 0:
            return self._in_new_group(self._as_other_user(inner, python), self._filter)
        return self._in_new_group((inner[0], "--info-fd", INFO, *inner[1:]), self._filter)

    def _in_new_group(self, argv: tuple[str, ...], program: bytes) -> ProcessCommand:
        if self._groups is None:
            return ProcessCommand(argv, program)
        try:
            group = self._groups.make_group()
        except OSError as error:
            raise StartError(f"there is no control group for the sandbox: {error}") from error
        return ProcessCommand(cgroup.command_within(group, argv), program, group)

    def _as_other_user(self, inner: Sequence[str], python: str) -> tuple[str, ...]:
        """Wrap the sandbox so that it runs as another user. Root's processes are exempt from
        process limits, and own files, so that user owns nothing. Only root may reach Python (below
        /root), so an outer file system exposes the same files. A process namespace replaces the
        signal at the parent's death, which does not pass from root to another user."""
        user = str(next(_NEXT_USER))
        setpriv = shutil.which("setpriv") or "setpriv"
        return (
            *(self._bwrap, "--info-fd", INFO, "--die-with-parent", "--unshare-pid"),
            *("--cap-drop", "ALL"),
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
            *_file_system(python, code_at=str(_CODE), tools=(self._bwrap, setpriv)),
            *("--bind", "/proc", "/proc", "--dir", "/tmp", "--chdir", "/"),
            *("--", setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--"),
            *inner,
        )


def kernel_settings_hint() -> str:
    """Return a hint at kernel settings that deny sandboxes to unprivileged users, if any do."""
    found = [
        f"{name} is {value}" for name, value in _FORBIDDING.items() if _read_setting(name) == value
    ]
    return f" ({', '.join(found)}: set with sysctl)" if found else ""


def _read_setting(name: str) -> str:
    path = Path("/proc/sys") / name.replace(".", "/")
    return path.read_text().strip() if path.exists() else ""


def _file_system(python: str, *, code_at: str, tools: Sequence[str] = ()) -> tuple[str, ...]:
    """Return bubblewrap's arguments: Python, the libraries it loads, and the worker's own code."""
    folders = [str(path) for path in (*_library_folders(), *_python_folders(), *_DATA)]
    # Packages installed beside Python are not part of it.
    hidden = [str(path) for path in _package_folders() if path.is_dir()]
    files = [python, *tools]
    # By default bubblewrap creates them for its own user only.
    parents = dict.fromkeys(
        str(parent)
        for path in (*folders, *files, code_at)
        for parent in reversed(Path(path).parents[:-1])
    )
    return (
        *(arg for path in parents for arg in ("--perms", "0755", "--dir", path)),
        *(arg for path in folders for arg in ("--ro-bind-try", path, path)),
        *(arg for path in hidden for arg in ("--tmpfs", path, "--remount-ro", path)),
        *(arg for path in files for arg in ("--ro-bind", path, path)),
        *("--ro-bind", str(_CODE), code_at),
    )


def _library_folders() -> list[Path]:
    """Return the folders that the loader searches. Debian keeps libraries in a folder per
    machine, separate from the rest of /usr/lib."""
    machine = sysconfig.get_config_var("MULTIARCH")
    places = [Path(place) for place in ("/lib", "/usr/lib")]
    apart = [place / machine for place in places if machine and (place / machine).is_dir()]
    return [Path("/lib64"), *(apart or [*places, Path("/lib32"), Path("/usr/lib64")])]


def _python_folders() -> list[Path]:
    """Return the base installation's folders; a virtual environment has no own libraries."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    named = [Path(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib")]
    prefix = Path(sys.base_prefix)
    if prefix in _SHARED:
        own = sorted((prefix / "lib").glob("libpython3*.so*"))
    else:
        own = [prefix / "lib"]
    return list(dict.fromkeys([*own, *named]))


def _package_folders() -> list[Path]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    within = Path(sys.base_prefix) / "lib"
    places = [within / version / "site-packages", within / version / "dist-packages"]
    return list(dict.fromkeys([*places, within / "python3" / "dist-packages"]))
