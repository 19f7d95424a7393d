"""`python -m tests.sky start|stop|status|run COMMAND...`: a box with SkyPilot, by hand.

`run` runs a command on the login host, where SkyPilot and the nodes answer.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict

from tests.sky.box import BoxError
from tests.sky.session import SkySession


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sky", description=__doc__)
    parser.add_argument("action", choices=("start", "stop", "status", "run"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    session = SkySession()
    began = time.monotonic()
    try:
        if arguments.action == "run":
            return _run(session, arguments.command)
        code = _act(session, arguments.action)
    except BoxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.action != "status":
        print(f"{arguments.action}: {time.monotonic() - began:.1f} s")
    return code


def _act(session: SkySession, action: str) -> int:
    """Return the exit code: 0, or 1 for the status of a session that does not exist."""
    if action == "start":
        session.start()
    elif action == "stop":
        session.stop()
    else:
        left = session.box.left()
        machines = session.cloud.machines() if session.cloud.answers() else []
        state = {"api_server": session.api.answers(), "machines": machines, **asdict(left)}
        print(json.dumps(state, indent=2))
        return 0 if left else 1
    return 0


def _run(session: SkySession, command: list[str]) -> int:
    if not session.api.answers():
        raise BoxError("SkyPilot's API server does not run: python -m tests.sky start")
    with session.inside():
        os.execvp(command[0], command)
    raise BoxError("no command to run")


if __name__ == "__main__":
    sys.exit(main())
