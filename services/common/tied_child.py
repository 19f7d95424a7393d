"""Become another command that gets a signal when its parent dies:

    tied_child.py PARENT_PID SIGNAL COMMAND...

This is run by path, and before anything else: the process is replaced at once. `python` is the
interpreter that runs this, wherever PATH leads."""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            raise SystemExit("the parent has ended already")
    if command[0] == "python":
        # Not only the file: an interpreter finds its packages by the name that it is called by.
        command[0] = sys.executable
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
