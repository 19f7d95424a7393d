"""The process that writes a run's dumps: `python -m services.learner.dumps`.

A child of the learner, so that it never delays a step: it runs at a low priority, reads the journal
without writing to it, and ends when its stdin does."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from services.common.adapters.token_text import NoTokenizerError, load_decoder
from services.common.errors import ConfigError
from services.common.printable_text import say, say_json
from services.common.private_process import keep_private
from services.learner.checkpoints.adapters.fsspec_store import open_store
from services.learner.dumps.dump_uploads import DumpUploads
from services.learner.dumps.dump_writer import DumpWriter
from services.learner.dumps.episode_text import Decode
from services.learner.dumps.jobs import DumpReport, DumpSetup, job_of_line

_NICENESS = 10
# What is left for uploads once the learner has no more jobs.
_UPLOADS_END_S = 20.0
_FAILED = 1


def main() -> int:
    setup = DumpSetup.from_line(sys.stdin.buffer.readline())
    try:
        decode = load_decoder(setup.model, setup.revision)
        uploads = _open_uploads(setup)
    except (NoTokenizerError, ConfigError) as error:
        say(f"error: {error}", file=sys.stderr)
        return _FAILED
    _do_jobs(setup, decode, uploads)
    if uploads is not None:
        uploads.close(_UPLOADS_END_S)
    return 0


def _do_jobs(setup: DumpSetup, decode: Decode, uploads: DumpUploads | None) -> None:
    written: Callable[[Path], None] = uploads.offer if uploads is not None else _ignore
    writer = DumpWriter(setup, decode, written)
    for line in sys.stdin.buffer:
        _report(writer.do_job(job_of_line(line)))


def _open_uploads(setup: DumpSetup) -> DumpUploads | None:
    if setup.remote is None:
        return None
    store = open_store(setup.remote, setup.remote_options)
    return DumpUploads(store, Path(setup.run_dir), _report)


def _ignore(path: Path) -> None:
    """Ignore a file: it is kept in the run's folder alone."""


_printing = threading.Lock()


def _report(report: DumpReport) -> None:
    with _printing:
        say_json(report.to_json())


if __name__ == "__main__":
    keep_private()
    os.nice(_NICENESS)
    sys.exit(main())
