"""Processes of a replica on this machine: in its leader's session, or with its mark."""

import os
import time
from contextlib import suppress

import psutil

from flotilla_launcher.state import Unit

# RUNS_FOLDER:RUN_ID/SERVICE-REPLICA#START
MARK_VARIABLE = "FLOTILLA_UNIT"
_POLL_S = 0.01
# Only a process in an uninterruptible system call takes longer to die.
_KILL_WAIT_S = 5.0


def start_time_of(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def is_alive(unit: Unit) -> bool:
    """Return whether the unit's process runs: another process may have its pid by now."""
    try:
        process = psutil.Process(unit.pid)
        same = abs(process.create_time() - unit.started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_members(unit: Unit, mark: str) -> None:
    members = find_members(unit, mark)
    for process in members:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _KILL_WAIT_S
    # psutil's own wait would take the exit code of our children from asyncio.
    while any(map(is_running, members)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_members(unit: Unit, mark: str) -> list[psutil.Process]:
    """List all processes in a replica's session or with its mark."""
    # An unrelated process with the leader's pid may lead a session of the same number.
    ours = is_alive(unit) or not psutil.pid_exists(unit.pid)
    return [
        process
        for process in psutil.process_iter()
        if (ours and _session_of(process.pid) == unit.pid) or mark_of(process) == mark
    ]


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def mark_of(process: psutil.Process) -> str:
    """Return the mark of a process of this user; "" for any other. Root can read every environment,
    and every user can write a mark into their own; a setuid program has its caller's
    environment."""
    try:
        ours = set(process.uids()) == {os.geteuid()}
        return process.environ().get(MARK_VARIABLE, "") if ours else ""
    except (psutil.Error, OSError):
        # A process of another user, or one that has just ended.
        return ""
