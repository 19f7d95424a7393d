"""Run a command, and end all that it has started together with it:

    process_reaper.py PARENT_PID COMMAND...

Orphans among its descendants become children of this process, whatever their session, and are
killed once the command ends, the parent dies or SIGHUP arrives. SIGTERM, sent to the whole process
group, is for the command.

Run it by path. Imports only the standard library."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_AWAITED = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM}


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        raise SystemExit("the parent has ended already")
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reaper, child = os.getpid(), os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        _become(command)
    # The parent would not see the command close its pipes while they are open here.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    code = _await_end(child)
    _kill_descendants()
    os._exit(code)


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _await_end(child: int) -> int:
    """Wait for the end of the command, or for SIGHUP; return the exit code as a shell shows it."""
    while (number := signal.sigwait(_AWAITED)) != signal.SIGHUP:
        if number != signal.SIGCHLD:
            continue
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return 128 + signal.SIGHUP


def _kill_descendants() -> None:
    """Kill children until there are none: those of a killed one become children of this process
    before its end can be seen."""
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in _find_children():
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)


def _find_children() -> Iterator[int]:
    own = str(os.getpid()).encode()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            # A command's name may contain anything, but nothing after it contains a parenthesis.
            if stat.read().rpartition(b")")[2].split()[1] == own:
                yield int(name)


if __name__ == "__main__":
    main()
