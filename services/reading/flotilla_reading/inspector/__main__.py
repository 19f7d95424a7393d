"""Show runs in a browser, down to the tokens of each episode:

    python -m flotilla_reading.inspector --runs runs --run demo-20260101-120000
    python -m flotilla_reading.inspector --runs runs --run demo-20260101-120000 --bundle demo.zip

Serves on loopback, and prints {"url": ...} once it does: open that. Works on running and finished
runs; its only effect on them is to delay pruning of what it shows. With `--bundle` it writes the
same pages of some steps to a zip file that needs no server."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

from flotilla_common.process.private_process import keep_private
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_reading.inspector.adapters.access import new_token
from flotilla_reading.inspector.adapters.rendering import STATIC, PageRenderer
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.adapters.web import listen_at, listen_on, serve
from flotilla_reading.inspector.bundle import BundleMaker
from flotilla_reading.inspector.queries.run_folders import NotFoundError, find_run
from flotilla_reading.inspector.queries.run_library import RunLibrary


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parse_arguments(argv)
    library = RunLibrary(chosen.runs, partial(load_run_tokenizer, policy=chosen.policy))
    try:
        if chosen.run:
            find_run(chosen.runs, chosen.run)
        if chosen.bundle:
            return _write_bundle(chosen, library)
        token = chosen.token_file.read_text().strip() if chosen.token_file else new_token()
        listener = listen_at(chosen.unix) if chosen.unix else listen_on(*chosen.listen)
    except (NotFoundError, OSError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 1
    path = f"runs/{quote(chosen.run, safe='')}" if chosen.run else ""
    serve(library, listener, token=token, path=path, end_with_stdin=chosen.end_with_stdin)
    return 0


def _write_bundle(chosen: argparse.Namespace, library: RunLibrary) -> int:
    maker = BundleMaker(library, PageRenderer().render, STATIC)
    print_json(maker.write(chosen.bundle, chosen.run, chosen.step))
    return 0


def _listen_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if host not in ("127.0.0.1", "localhost", "::1") or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a loopback address such as 127.0.0.1:0")
    return host, int(port)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_reading.inspector",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs (runs)")
    parser.add_argument("--run", help="the run to open, or to bundle")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen",
        type=_listen_address,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="a loopback address; port 0 picks a free one (127.0.0.1:0)",
    )
    where.add_argument("--unix", type=Path, metavar="PATH", help="listen at a socket file instead")
    parser.add_argument("--policy", type=Path, help="model folder with the tokenizer (the run's)")
    parser.add_argument("--token-file", type=Path, help="file with the token (a new one)")
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end when standard input does"
    )
    parser.add_argument("--bundle", type=Path, metavar="OUT.zip", help="write pages to a zip file")
    parser.add_argument(
        "--step", type=int, action="append", help="a step to bundle; may be repeated (the last)"
    )
    chosen = parser.parse_args(argv)
    if chosen.bundle and not chosen.run:
        parser.error("--bundle needs --run, the run to bundle")
    if chosen.step and not chosen.bundle:
        parser.error("--step requires --bundle")
    return chosen


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
