"""Open files of a process that serves: each connection, and each call to others, holds one.

The usual soft limit, 1024, is less than there may be of them, and gRPC then accepts nobody.
"""

import resource

_FILES = 65536
# Strangers need no token to connect: most files stay for what a service opens itself.
_CONNECTIONS_SHARE = 4


def raise_file_limit() -> None:
    """Raise the soft limit as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _max_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (_max_files(), hard))


def most_connections() -> int:
    """Return how many connections one server may hold."""
    return _max_files() // _CONNECTIONS_SHARE


def _max_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
