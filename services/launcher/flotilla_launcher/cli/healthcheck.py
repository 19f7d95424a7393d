"""Health check of the launcher of a runs folder, for container engines:

    python -m flotilla_launcher.cli.healthcheck --runs runs

Address and certificate come from its launcher.json: a launcher mints its own certificates and
has no --tls-dir. The exit codes are those of flotilla_common.healthcheck."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flotilla_common.healthcheck import NOT_SERVING, WRONG, report_health
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.security import launcher_address
from flotilla_launcher.security.certificates import LAUNCHER


def main(argv: Sequence[str] | None = None) -> int:
    given = _make_parser().parse_args(argv)
    try:
        found = launcher_address.read_address(given.runs)
        if found is None:
            print_visible(f"no launcher is running for {given.runs}")
            return NOT_SERVING
        return report_health(found.local_address, found.tls, given.timeout, peer=LAUNCHER)
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return WRONG


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_launcher.cli.healthcheck",
        description="Check whether a launcher serves. Exit code: 0 yes, 1 no, 2 bad arguments.",
    )
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs"), help="its runs folder (%(default)s)")
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
