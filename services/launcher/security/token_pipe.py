"""Token pipe of a replica on this machine: a pipe that is empty once the token was read.

An environment is inherited by every child, and can be read for as long as the process lives."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.arguments import TOKEN_VARIABLE


@dataclass(frozen=True, slots=True)
class TokenPipe:
    """Additions to the command's start: further arguments, and descriptors that stay open."""

    arguments: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()


@contextmanager
def token_in_pipe(secrets: Mapping[str, str]) -> Generator[TokenPipe]:
    """Provide a pipe for the start of a process, which may read the token in `secrets`, if
    there is one."""
    token = secrets.get(TOKEN_VARIABLE)
    if token is None:
        yield TokenPipe()
        return
    reader, writer = os.pipe()
    try:
        # Less than a pipe holds, so this does not wait for a reader.
        os.write(writer, token.encode())
    finally:
        os.close(writer)
    try:
        yield TokenPipe(("--token-file", f"/dev/fd/{reader}"), (reader,))
    finally:
        os.close(reader)
