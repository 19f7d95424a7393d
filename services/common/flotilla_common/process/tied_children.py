"""Children of multiprocessing that end with this process, however it ends, from their first step.

A child that ties itself can only do so after its imports; until then, nothing ends it."""

import atexit
import ctypes
import multiprocessing.resource_tracker
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.child_environment import child_environment
from flotilla_common.telemetry.log import get_logger

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_TIED_CHILD = Path(__file__).with_name("tied_child.py")
_PROBE_S = 30.0

log = get_logger(__name__)


class _Forks:
    """Number of blocks that want forked children tied; a fork hook cannot be removed."""

    open = 0
    hooked = False
    # The forking process.
    parent = 0


def end_with_parent() -> None:
    """Request that the kernel kills this process when the thread that started it ends. Raises
    OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


@contextmanager
def tie_children() -> Generator[None]:
    """Tie the children that multiprocessing starts during the block, forked or spawned."""
    if sys.platform != "linux":
        yield
        return
    if not _Forks.hooked:
        os.register_at_fork(before=_note_parent, after_in_child=_tie_fork)
        _Forks.hooked = True
    # It must outlive this process, whose shared memory it removes.
    multiprocessing.resource_tracker.ensure_running()
    _Forks.open += 1
    multiprocessing.set_executable(_make_interpreter(os.getpid()))
    try:
        yield
    finally:
        _Forks.open -= 1
        multiprocessing.set_executable(sys.executable)


def _note_parent() -> None:
    _Forks.parent = os.getpid()


def _tie_fork() -> None:
    if not _Forks.open:
        return
    end_with_parent()
    if os.getppid() != _Forks.parent:
        # The parent was killed before this process was tied to it.
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def _make_interpreter(parent: int) -> str:
    """Create a script that runs this interpreter tied to `parent`, this process. The script stays
    as long as this process, because a newly started child has yet to read it."""
    kept = ExitStack()
    folder, _ = kept.enter_context(scratch_folder())
    atexit.register(kept.close)
    program, tied = shlex.quote(sys.executable), shlex.quote(str(_TIED_CHILD))
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nexec {program} -I -S {tied} {parent} {int(signal.SIGKILL)} {program} "$@"\n'
    )
    path.chmod(0o700)
    try:
        subprocess.run(
            [path, "-I", "-S", "-c", ""], check=True, timeout=_PROBE_S, env=child_environment()
        )
    except (OSError, subprocess.SubprocessError) as error:
        # For example a file system mounted noexec.
        log.warning("spawned children tie themselves late", reason=str(error))
        return sys.executable
    return str(path)
