"""Process that writes a run's dumps: `python -m flotilla_learner.dumps`.

A child of the learner, so that it never delays a step: it runs at a low priority, reads the journal
without writing to it, and ends when its stdin does."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from flotilla_common.adapters.token_text import NoTokenizerError, load_decoder
from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.process.private_process import keep_private
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry import log
from flotilla_common.text.json_lines import decode_line, encode_line
from flotilla_common.text.printable_text import print_visible
from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from flotilla_learner.dumps.dump_uploads import DumpUploads
from flotilla_learner.dumps.dump_writer import DumpWriter
from flotilla_learner.dumps.jobs import DumpReport, DumpSetup, job_of_line

_NICENESS = 10
# Time for uploads once the learner has no more jobs.
_UPLOADS_END_S = 20.0
_FAILED = 1


def main() -> int:
    parent = ParentChannel()
    setup = decode_line(DumpSetup, parent.requests.readline())
    run_dir = Path(setup.run_dir)
    log.setup("learner-dumps", run_dir.name)

    def report(report: DumpReport) -> None:
        parent.write(encode_line(report))

    try:
        decode = load_decoder(setup.model, setup.revision)
        uploads = _open_uploads(setup, report)
    except (NoTokenizerError, ConfigError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return _FAILED
    # Without uploads, a file stays only in the run's folder.
    offer = uploads.offer if uploads is not None else lambda _: None
    writer = DumpWriter(setup, decode, offer)
    for line in parent.read_lines():
        report(writer.do_job(job_of_line(line)))
    if uploads is not None:
        uploads.close(_UPLOADS_END_S)
    return 0


def _open_uploads(setup: DumpSetup, report: Callable[[DumpReport], None]) -> DumpUploads | None:
    if setup.remote is None:
        return None
    store = open_store(setup.remote, setup.remote_options)
    return DumpUploads(store, Path(setup.run_dir), report)


if __name__ == "__main__":
    keep_private()
    os.nice(_NICENESS)
    sys.exit(main())
