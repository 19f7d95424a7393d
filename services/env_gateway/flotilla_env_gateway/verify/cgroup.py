"""Control groups for sandboxes, if the kernel lets this process create them (version 2 only).

A process's own limits do not cover kernel memory used on its behalf. A group counts that too, for
all processes of a sandbox together.
"""

import asyncio
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flotilla_common.process.child_environment import child_environment
from flotilla_common.telemetry.log import get_logger

_LOG = get_logger(__name__)
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NAME = "flotilla-verifier"
# Memory for bubblewrap and the kernel besides the verifier.
_MARGIN_BYTES = 64 * 2**20
# Bubblewrap and the verifier, each of them with a process that waits for it.
_PROCESSES = 16
_ONE_CORE = "100000 100000"
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_PROBE_S = 5.0
_REMOVE_TRIES, _AGAIN_S = 100, 0.02


class ControlGroups:
    """Factory of groups in `parent`, one per sandbox. `limits` gives the content of each file."""

    def __init__(self, parent: Path, limits: dict[str, str]) -> None:
        self._parent = parent
        self.limits = limits
        self._numbers = itertools.count()

    @classmethod
    def find_usable(cls, memory_bytes: int) -> "ControlGroups | None":
        """Find a parent in which this process can make limiting groups; None if there is none."""
        wanted = {
            "memory": ("memory.max", str(memory_bytes + _MARGIN_BYTES)),
            "pids": ("pids.max", str(_PROCESSES)),
            "cpu": ("cpu.max", _ONE_CORE),
        }
        for parent in _iterate_parents():
            enabled = _enabled_controllers(parent, list(wanted))
            groups = cls(parent, dict(wanted[name] for name in enabled))
            if enabled and groups._admits_process():
                _remove_stale(parent)
                return groups
        return None

    def make_group(self) -> Path:
        """Make a group with the limits set. Raises OSError."""
        group = self._parent / f"{_NAME}-{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        try:
            for name, value in self.limits.items():
                (group / name).write_text(value)
        except OSError:
            group.rmdir()
            raise
        return group

    def _admits_process(self) -> bool:
        """Return True if a process can enter a new group, which needs more rights than making
        one."""
        try:
            group = self.make_group()
        except OSError:
            return False
        try:
            done = subprocess.run(
                command_within(group, ("true",)),
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
                env=child_environment(),
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        finally:
            with suppress(OSError):
                group.rmdir()
        return done.returncode == 0


def command_within(group: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that enters `group` first, so that its children are in it too."""
    return ("/bin/sh", "-c", _JOIN, str(group), *command)


async def remove_group(group: Path) -> None:
    """Remove a group whose processes have ended; retry, because the kernel may need a moment
    to notice."""
    for _ in range(_REMOVE_TRIES):
        if _try_remove(group):
            return
        await asyncio.sleep(_AGAIN_S)
    _LOG.warning("control_group_left", group=str(group))


def _try_remove(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _iterate_parents() -> Iterator[Path]:
    """Yield groups that may hold new ones, from this process's own upwards as far as
    permitted: moving a process needs rights in every group between."""
    lines = _OWN.read_text().splitlines() if _OWN.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or not (_ROOT / "cgroup.controllers").exists():
        return
    for path in (_ROOT / own, *(_ROOT / own).parents):
        if not (os.access(path, os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)):
            return
        yield path
        if path == _ROOT:
            return


def _enabled_controllers(parent: Path, wanted: Sequence[str]) -> list[str]:
    """Return the controllers that limit groups in `parent`. In a group delegated to this user,
    enable the missing ones, which delegation left to the user; in one that root owns, leave
    that to others."""
    control = parent / "cgroup.subtree_control"
    if _owner(parent) == os.geteuid() != 0:
        for name in set(wanted) & set((parent / "cgroup.controllers").read_text().split()):
            # Impossible in a group that has processes itself.
            with suppress(OSError):
                control.write_text(f"+{name}")
    enabled = control.read_text().split()
    return [name for name in wanted if name in enabled]


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _remove_stale(parent: Path) -> None:
    """Remove the groups that killed gateways left behind."""
    for group in parent.glob(f"{_NAME}-*-*"):
        if not Path("/proc", group.name.split("-")[2]).exists():
            with suppress(OSError):
                group.rmdir()
