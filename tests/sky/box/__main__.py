"""`python -m tests.sky.box install|prepare|start|stop|status`: a box from the command line."""

import argparse
import json
import sys
import time
from dataclasses import asdict

from tests.sky.box.cluster import Box
from tests.sky.box.layout import Layout
from tests.sky.box.prepare import BoxError, install, prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sky.box", description=__doc__)
    commands = ("install", "prepare", "start", "stop", "status")
    parser.add_argument("command", choices=commands)
    command = parser.parse_args().command
    began = time.monotonic()
    try:
        code = _run(command)
    except BoxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if command != "status":
        print(f"{command}: {time.monotonic() - began:.1f} s")
    return code


def _run(command: str) -> int:
    """Return the exit code: 0, or 1 for the status of a box that does not exist."""
    box = Box()
    if command == "install":
        print(f"installed: {' '.join(install()) or 'nothing, all is here'}")
    elif command == "prepare":
        prepare(Layout())
    elif command == "start":
        box.start()
    elif command == "stop":
        box.stop()
    else:
        left = box.left()
        print(json.dumps(asdict(left), indent=2))
        return 0 if left else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
