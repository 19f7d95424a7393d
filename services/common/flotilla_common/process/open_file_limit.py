"""Open files of a serving process: each connection, and each outgoing call, holds one.

The usual soft limit of 1024 can be exhausted, and gRPC then accepts no connection.
"""

import resource

_FILES = 65536
# Connecting needs no token, so most files are reserved for what a service opens itself.
_CONNECTIONS_SHARE = 4


def raise_file_limit() -> None:
    """Raise the soft limit as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _max_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (_max_files(), hard))


def most_connections() -> int:
    """Return how many connections one server may hold."""
    return _max_files() // _CONNECTIONS_SHARE


def _max_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
