"""Become another command that gets a signal when its parent dies:

    tied_child.py PARENT_PID SIGNAL COMMAND...

Run it by path: it replaces the process at once. The command `python` stands for the interpreter
that runs this, regardless of PATH."""

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
        # Also as argv[0], because an interpreter finds its packages by it.
        command[0] = sys.executable
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
