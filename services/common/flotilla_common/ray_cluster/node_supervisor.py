"""Supervisor of one Ray node: `python -m flotilla_common.ray_cluster.node_supervisor`.

Not for use by hand. It reads one JSON line from stdin, starts `ray start --block`, reports when
that runs, and ends with it. Another line stops the node. If stdin ends first, for example because
the parent process has ended, the node is killed. Ray then leaves agents behind: the supervisor
kills all processes that the node has started, and removes its folder."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.ray_cluster.cluster_settings import HUB_TOKEN, cluster_environment
from flotilla_common.text.printable_text import print_json, print_visible

# Holds Ray's sockets; the path of a socket has at most 107 bytes.
_PREFIX = "flotilla-ray-"
# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SECONDS = 5.0
_STARTED = "Ray runtime started"


def main() -> None:
    """Run the node described by the first line, until it or stdin ends."""
    config: dict[str, Any] = json.loads(sys.stdin.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler, because children would inherit an ignored signal.
        signal.signal(number, lambda *_: None)
    _adopt_orphans()
    with scratch_folder(_PREFIX) as (folder, _):
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(config["token"])
        code = _run_node(config["arguments"], token_file, folder)
        _end_children()
    sys.exit(code)


def _adopt_orphans() -> None:
    """Make this process the parent of all descendants whose parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _run_node(arguments: list[str], token_file: Path, folder: Path) -> int:
    """Run the node to its end and return its exit code."""
    ray = python_command("-m", "ray.scripts.scripts", "start", "--block", *arguments)
    node = subprocess.Popen(
        (*ray, f"--temp-dir={folder}"),
        env={**child_environment(HUB_TOKEN, ours=True), **cluster_environment(token_file)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    threading.Thread(target=_stop_with_stdin, args=(node,), daemon=True).start()
    assert node.stdout is not None
    for line in node.stdout:
        print_visible(line, end="", file=sys.stderr)
        if _STARTED in line:
            print_json({"started": True})
    return node.wait()


def _stop_with_stdin(node: subprocess.Popen[str]) -> None:
    """Stop the node in order at the next line of stdin, so that the cluster is notified; kill it if
    that takes too long or stdin has ended."""
    if sys.stdin.readline():
        node.terminate()
        with suppress(subprocess.TimeoutExpired):
            node.wait(_STOP_SECONDS)
    # Also kills any process that still has the node's output open.
    _kill_children()


def _end_children() -> None:
    """Kill all descendants and wait until none is left: the children of each become ours."""
    while True:
        _kill_children()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_children() -> None:
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
