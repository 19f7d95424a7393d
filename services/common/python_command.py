"""Commands that start another process of ours."""

import os
import sys
from pathlib import Path
from signal import Signals


def python_command(*words: str, executable: str | None = None) -> tuple[str, ...]:
    """Return a command of this interpreter, or of `executable`, with `words`.

    The working directory is the user's, and `-m` and `-c` look there first: a `services` or a
    `json.py` of theirs would be imported in place of ours or Python's. Hence `-P`."""
    return (executable or sys.executable, "-P", *words)


def tied_command(number: Signals, *command: str) -> tuple[str, ...]:
    """Return a command that gets this signal when the process that starts it ends, be it killed.

    Not by `preexec_fn`: with it Python forks as gRPC's fork handlers see it, and gRPC's threads
    have crashed the child before it became the command."""
    program = Path(__file__).with_name("tied_child.py")
    return python_command(str(program), str(os.getpid()), str(int(number)), *command)
