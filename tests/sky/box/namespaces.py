"""Network namespaces joined by a bridge, and the processes that live in them."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.sky.box.layout import LOGIN, Layout

NETNS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def connect(layout: Layout) -> None:
    """A namespace per host; the login host's holds the bridge."""
    login = layout.namespace(LOGIN)
    ip("netns", "add", login)
    ip("-n", login, "link", "set", "lo", "up")
    ip("-n", login, "link", "add", "br0", "type", "bridge")
    ip("-n", login, "addr", "add", f"{layout.address(LOGIN)}/24", "dev", "br0")
    ip("-n", login, "link", "set", "br0", "up")
    for number, node in enumerate(layout.nodes):
        plug(login, layout.namespace(node), f"v{number}", layout.address(node))


def plug(login: str, namespace: str, port: str, address: str) -> None:
    """A new namespace on the bridge of `login`."""
    ip("netns", "add", namespace)
    ip("-n", namespace, "link", "set", "lo", "up")
    ends = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
    ip("-n", login, "link", "add", port, *ends)
    ip("-n", login, "link", "set", port, "master", "br0", "up")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")


def existing(prefix: str) -> list[str]:
    """Namespaces whose names begin with `prefix-`."""
    if not NETNS.is_dir():
        return []
    return sorted(path.name for path in NETNS.iterdir() if path.name.startswith(f"{prefix}-"))


def delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def processes_in(namespaces: Iterable[str]) -> set[int]:
    """Ids of the processes in any of these namespaces, but for this one."""
    wanted: set[int] = set()
    for name in namespaces:
        with suppress(FileNotFoundError):
            wanted.add((NETNS / name).stat().st_ino)
    return {pid for pid in _pids() if _inode(pid) in wanted} - {os.getpid()}


def processes_of(uid: int) -> set[int]:
    """Ids of the processes of a user."""
    found: set[int] = set()
    for pid in _pids():
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}").stat().st_uid == uid and _inode(pid) is not None:
                found.add(pid)
    return found


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _inode(pid: int) -> int | None:
    """Return the inode of the process's network namespace; None when it has ended, reaped or
    not."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def kill(pids: set[int], grace_s: float) -> None:
    """SIGTERM, and SIGKILL for those that have not ended within `grace_s`."""
    _signal(pids, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (pids := {pid for pid in pids if _inode(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(pids, signal.SIGKILL)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def mounts_below(folder: Path) -> list[Path]:
    """Mount points of this machine in a folder, innermost first."""
    points = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.is_relative_to(folder)), reverse=True)


def unmount(point: Path) -> None:
    subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)


@contextmanager
def entered(namespace: str) -> Generator[None]:
    """Move this thread, and its new children meanwhile, to a namespace and back."""
    with open("/proc/thread-self/ns/net") as before, open(NETNS / namespace) as inside:
        _setns(inside.fileno())
        try:
            yield
        finally:
            _setns(before.fileno())


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
