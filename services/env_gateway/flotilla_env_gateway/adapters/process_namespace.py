"""Process namespaces by bubblewrap: the kernel ends all processes of one together."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flotilla_common.process.child_environment import child_environment

_PROBE_S = 5.0
# Everything but the processes is that of the gateway. The first process is in a session, and a
# group, of its own, in which signals reach all but itself.
_SHARED = ("--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc")
_ENDING = ("--die-with-parent", "--new-session")


@cache
def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap if it can make a process namespace here; tried only once."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return None
    try:
        os.close(os.pidfd_open(os.getpid()))
        done = subprocess.run(
            (bwrap, *_SHARED, *_ENDING, *_kept_rights(), "--", "true"),
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
            env=child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return bwrap if done.returncode == 0 else None


def command_in_namespace(
    bwrap: str,
    command: Sequence[str],
    *,
    info: int,
    folder: Path | None,
    mounts: Sequence[tuple[Path, Path]],
) -> tuple[str, ...]:
    """Return a command that runs `command` in a process namespace, in `folder` or by default our
    working directory, with `mounts`, each a folder and the path where it is seen. The first process
    is reported, as JSON, to the descriptor `info`."""
    binds = [word for mount in mounts for word in ("--bind", *map(str, mount))]
    place = () if folder is None else ("--chdir", str(folder))
    return (
        *(bwrap, *_SHARED, *binds, *place, *_ENDING, *_kept_rights()),
        *("--info-fd", str(info), "--", *command),
    )


def _kept_rights() -> tuple[str, ...]:
    """Return the option that lets root's command keep the rights that root has without it."""
    return ("--cap-add", "ALL") if os.geteuid() == 0 else ()
