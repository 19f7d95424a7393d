"""What episodes leave behind: processes with a mark in their environment, and files."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_END_S = 10.0


def kill_server(task_key: str) -> None:
    """Kill the server of the episode of a task: of the processes that know the task's key, the one
    that was started last."""
    processes = list(find_processes("FLOTILLA_TASK_KEY", task_key))
    parents = {process.ppid() for process in processes}
    [server] = [process for process in processes if process.pid not in parents]
    server.send_signal(signal.SIGKILL)


def find_processes(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield the processes that have, or have inherited, a variable of that value."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def list_folders(root: Path) -> set[str]:
    """Return the folders below a folder, some of which may be about to be removed."""
    return {folder for folder, _, _ in os.walk(root)}


async def assert_soon(seen: Callable[[], Any], wanted: Any) -> None:
    """Assert that something becomes what is wanted: an episode's end is not awaited by a client."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while seen() != wanted:  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.05)
    assert seen() == wanted
