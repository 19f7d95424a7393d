"""First steps of our processes, so that their data stays private to their user."""

import os
import resource

# Smaller than any dump, and also keeps Linux from starting a dump handler: 0 would not stop one
# that `core_pattern` pipes to.
_NO_DUMP = 1


def keep_private() -> None:
    """Make new files of this process and its children readable by their user only, and disable
    core dumps."""
    os.umask(0o077)
    refuse_core_dumps()


def refuse_core_dumps() -> None:
    """Keep memory with keys in it off the disk, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (_NO_DUMP, _NO_DUMP))
