"""Token pipe of a replica on this machine, empty once the token is read.

Every child inherits an environment, which stays readable while the process lives."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from flotilla_common.process.arguments import TOKEN_VARIABLE


@dataclass(frozen=True, slots=True)
class TokenPipe:
    """Additions to a command: further arguments, and descriptors to keep open."""

    arguments: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()


@contextmanager
def token_in_pipe(secrets: Mapping[str, str]) -> Generator[TokenPipe]:
    """Provide a pipe from which a new process reads the token in `secrets`, if there is one."""
    token = secrets.get(TOKEN_VARIABLE)
    if token is None:
        yield TokenPipe()
        return
    reader, writer = os.pipe()
    try:
        # A token fits into the pipe's buffer, so this does not block.
        os.write(writer, token.encode())
    finally:
        os.close(writer)
    try:
        yield TokenPipe(("--token-file", f"/dev/fd/{reader}"), (reader,))
    finally:
        os.close(reader)
