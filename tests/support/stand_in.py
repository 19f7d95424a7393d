"""Stand-in for a process that a forge forks: `stand_in.py ADDRESS WORDS`, or a call.

It imports so little that a Python that runs it starts in milliseconds."""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn


def stand_in(address: str, words: Sequence[str]) -> NoReturn:
    """Hand this process's descriptors and environment to a fork of the forge at `address`, which
    runs `words` as Python does, pass signals on to it, and end as it ends."""
    handed = _inherited_descriptors()
    with socket.socket(socket.AF_UNIX) as forge:
        forge.connect(address)
        wish = {
            "words": list(words),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "descriptors": handed,
        }
        requests = json.dumps(wish).encode()
        socket.send_fds(forge, [len(requests).to_bytes(4, "big")], handed)
        forge.sendall(requests)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: forge.sendall(bytes([received])))
        for descriptor in handed:
            if descriptor != 2:
                os.close(descriptor)
        _show_fork(int.from_bytes(forge.recv(4), "big"))
        code = int(forge.recv(16) or "1")
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _show_fork(pid: int) -> None:
    """Make the fork's pid this process's name, which `process_forge.fork_of` reads."""
    with open("/proc/self/comm", "w") as name:
        name.write(f"fork {pid}")


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that the parent process handed over."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return sorted(number for number in numbers if _is_inherited(number))


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        # It was the folder's own.
        return False


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
