"""Asks the launcher of a runs folder whether it serves, as container engines do:

    python -m services.launcher.cli.healthcheck --runs runs

Address and certificate are those of its launcher.json: a launcher mints them, and takes no
--tls-dir. The exit codes are those of services.common.healthcheck.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import ConfigError
from services.common.healthcheck import NOT_SERVING, SERVING, WRONG, ask
from services.common.text import say
from services.launcher import launcher_address
from services.launcher.security.certificates import LAUNCHER


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        found = launcher_address.read(given.runs)
        if found is None:
            say(f"no launcher is running for {given.runs}")
            return NOT_SERVING
        reason = asyncio.run(ask(found.here, found.tls, given.timeout, peer=LAUNCHER))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return WRONG
    say(f"{found.here}: {reason or 'serving'}")
    return NOT_SERVING if reason else SERVING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.launcher.cli.healthcheck",
        description="Ask a launcher whether it serves. Exit code: 0 yes, 1 no, 2 asked wrongly.",
    )
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs"), help="its folder of all runs (%(default)s)")
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
