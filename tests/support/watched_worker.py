"""The process that watchers start in tests: `python -m tests.support.watched_worker DOES ...`.

crash        prints last words and exits with code 3
serve        waits for SIGTERM, prints "drained" and exits with code 0
litter       starts a child in a session of its own, then serves
deaf         ignores SIGTERM, with a child that does too
count FILE   writes numbered lines for ever, each to stdout and then to FILE
report FILE  writes its environment and arguments to FILE, then serves
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from flotilla_common.files.durable_files import replace_file

_IGNORE = "trap '' TERM; sleep 300"


def main(does: str, rest: list[str]) -> None:
    """Do what the first argument names; a watcher adds the further ones."""
    print(f"{does} begins, pid {os.getpid()}", flush=True)
    if does == "crash":
        print("last words: out of luck", flush=True)
        sys.exit(3)
    if does == "litter":
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if does == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sh", "-c", _IGNORE], start_new_session=True)
    if does == "report":
        reported = {"environ": dict(os.environ), "argv": sys.argv}
        replace_file(Path(rest[0]), json.dumps(reported).encode())
    if does == "count":
        count(Path(rest[0]))
    if does != "deaf":
        signal.signal(signal.SIGTERM, drained)
    while True:
        signal.pause()


def drained(*_: object) -> None:
    print("drained", flush=True)
    sys.exit(0)


def count(truth: Path) -> None:
    """A burst of lines now and then, some of them long."""
    name = uuid.uuid4().hex[:8]
    with truth.open("a") as file:
        for number in range(1_000_000):
            line = f"line {name} {number} {'x' * (number % 97)}"
            print(line, flush=True)
            print(line, file=file, flush=True)
            if number % 25 == 0:
                time.sleep(0.03)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
