"""Open files of a process that serves: each connection, and each call to others, holds one.

The usual soft limit, 1024, is less than there may be of them, and gRPC then accepts nobody.
"""

import resource

_FILES = 65536
# Strangers need no token to connect: most files stay for what a service opens itself.
_CONNECTIONS_SHARE = 4


def allow() -> None:
    """Raise the soft limit as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _most():
        resource.setrlimit(resource.RLIMIT_NOFILE, (_most(), hard))


def most_connections() -> int:
    """How many connections one server may hold."""
    return _most() // _CONNECTIONS_SHARE


def _most() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
