"""First steps of a process of ours, so that what it knows stays with its user."""

import os
import resource

# Less than any dump has, and what tells Linux to start no handler of dumps either: one that
# `core_pattern` pipes to is not stopped by 0.
_NO_DUMP = 1


def keep_private() -> None:
    """Make the files of this process and its children for their user alone, and let none of them
    leave a core dump."""
    os.umask(0o077)
    refuse_core_dumps()


def refuse_core_dumps() -> None:
    """Have no memory with keys in it written to a disk, by this process or its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (_NO_DUMP, _NO_DUMP))
