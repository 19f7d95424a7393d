"""Processes of a replica on this machine: in its leader's session, or with its mark."""

import os
import time
from contextlib import suppress

import psutil

from services.launcher.state import Unit

# RUNS_FOLDER:RUN_ID/SERVICE-REPLICA#START
MARK_VARIABLE = "FLOTILLA_UNIT"
_POLL_S = 0.1
# Only a process in an uninterruptible system call takes longer to die.
_KILL_WAIT_S = 5.0


def wait_until_gone(unit: Unit, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while is_alive(unit) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def start_time_of(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def is_alive(unit: Unit) -> bool:
    """Return whether that very process runs: its pid alone may be somebody else's by now."""
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
    # Not psutil's own wait: it would take the exit code of our children from asyncio.
    while any(map(is_running, members)) and time.monotonic() < deadline:
        time.sleep(_POLL_S / 10)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_members(unit: Unit, mark: str) -> list[psutil.Process]:
    """List all processes in a replica's session or with its mark."""
    # A stranger that got the leader's pid may lead a session of the same number.
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
    """Empty unless it is this user's: root reads every environment, and anybody may write a mark
    into their own. A program with its owner's rights has the environment of who called it."""
    try:
        ours = set(process.uids()) == {os.geteuid()}
        return process.environ().get(MARK_VARIABLE, "") if ours else ""
    except (psutil.Error, OSError):
        # Somebody else's process, or one that has just ended: not ours to judge.
        return ""
