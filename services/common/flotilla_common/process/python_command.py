"""Commands that start another of our processes."""

import os
import sys
from pathlib import Path
from signal import Signals


def python_command(*words: str, executable: str | None = None) -> tuple[str, ...]:
    """Return a command of this interpreter, or of `executable`, with `words`.

    The working directory is the user's, and `-m` and `-c` search it first: their `services` or
    `json.py` would be imported in place of ours or Python's. Hence `-P`."""
    return (executable or sys.executable, "-P", *words)


def tied_command(number: Signals, *command: str) -> tuple[str, ...]:
    """Return a command that gets this signal when its parent process ends, even if killed.

    `preexec_fn` is no alternative: with it Python's fork runs gRPC's fork handlers, and gRPC's
    threads have crashed the child before exec."""
    program = Path(__file__).with_name("tied_child.py")
    words = (str(program), str(os.getpid()), str(int(number)), *command)
    # Isolated and without site packages it starts sooner; what it becomes is not affected.
    return (sys.executable, "-I", "-S", *words)
