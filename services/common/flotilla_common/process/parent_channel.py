"""A child's side of the channel to the parent that started it (`line_channel.py`)."""

import os
import threading
from collections.abc import Iterator
from typing import BinaryIO


class ParentChannel:
    """stdin and stdout, claimed for the channel: later use of them by other code is harmless. It
    reads nothing, and what it prints goes to stderr."""

    def __init__(self) -> None:
        self.requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._answers = os.fdopen(os.dup(1), "wb")
        self._turn = threading.Lock()
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)

    def read_lines(self) -> Iterator[bytes]:
        """Yield lines until the parent ends, which may be in the middle of one."""
        while (line := self.requests.readline()).endswith(b"\n"):
            yield line

    def write(self, answer: bytes) -> None:
        """Write an answer at once, from any thread."""
        with self._turn:
            self._answers.write(answer)
            self._answers.flush()
