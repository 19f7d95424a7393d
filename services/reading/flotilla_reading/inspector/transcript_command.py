"""Write the transcript of a step or an evaluation as a log of Inspect AI:

    python -m flotilla_reading.inspector.transcript_command --run runs/RUN --step 12 --to x.eval

Of low priority, because the run may still train beside it. The last line is JSON: the log's task,
its id and its number of samples."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flotilla_common.process.private_process import keep_private
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_reading.inspector.adapters.inspect_log import write_log
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.queries.episodes import EpisodeShelf
from flotilla_reading.inspector.queries.run_folders import (
    NotFoundError,
    describe_run,
    read_journal,
)
from flotilla_reading.inspector.queries.transcript_attempts import (
    TranscriptSubject,
    read_attempts,
)

_NICENESS = 10


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parse_arguments(argv)
    os.nice(_NICENESS)
    subject = TranscriptSubject(chosen.step, chosen.eval or "")
    try:
        with read_journal(chosen.run) as db:
            attempts = read_attempts(db, subject)
        tokenizer = load_run_tokenizer(chosen.run, chosen.policy)
        shelf = EpisodeShelf(chosen.run, tokenizer)
        head = {"run": chosen.run.name, "model": describe_run(chosen.run).model or "policy"}
        if notes := " ".join(filter(None, (attempts.note, tokenizer.problem))):
            head["left_out"] = notes
        episodes = (shelf.read(row.key) for _, row in attempts.tries)
        written = write_log(chosen.to, subject.title, head, episodes)
    except (NotFoundError, OSError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 1
    print_json(written)
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_reading.inspector.transcript_command",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="a step")
    which.add_argument("--eval", help="the id of an evaluation")
    parser.add_argument("--policy", type=Path, help="model folder with the tokenizer (the run's)")
    parser.add_argument("--to", type=Path, required=True, help="the file to write, *.eval")
    return parser.parse_args(argv)


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
