"""Write the episodes of a run as Parquet, or as a folder for Hugging Face's `datasets`.

Prints {"done": N, "of": N} from time to time; the last line is {"rows": N, "pruned": N}, where
`pruned` counts attempts that were left out because their tokens are no longer kept."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.common.adapters.token_text import NoTokenizerError, load_decoder
from services.common.process.extras import install_command
from services.common.process.private_process import refuse_core_dumps
from services.common.rpc.errors import ConfigError
from services.common.spec.spec import PolicyConfig, parse_shared
from services.common.text.printable_text import print_json, print_visible
from services.learner.dumps.kept_episodes import KeptEpisodes, Row
from services.learner.journal.attempt_filter import AttemptFilter, explain_no_match
from services.learner.journal.connection import JournalError
from services.learner.journal.schema import JOURNAL_FILE
from services.learner.journal.store import open_read_only

OK, UNABLE = 0, 2
_REPORT_S = 0.2


class TrajectoryExportError(Exception):
    """Nothing can be exported; the message gives the reason and the remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parse_arguments(argv)
    wanted = AttemptFilter(given.step, given.env, passed=given.passed or None)
    refusals = (TrajectoryExportError, JournalError, NoTokenizerError, ConfigError, OSError)
    try:
        result = _export(given.run_dir, given.out, given.format, wanted)
    except refusals as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return UNABLE
    print_json(result)
    return OK


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m services.learner.dumps.export_command",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--format", choices=("parquet", "datasets"), default="parquet")
    parser.add_argument("--env", help="attempts in this environment")
    parser.add_argument("--step", type=int, help="attempts that this step counted")
    parser.add_argument("--passed", action="store_true", help="attempts with a reward of 1")
    return parser.parse_args(argv)


def _export(run_dir: Path, out: Path, form: str, wanted: AttemptFilter) -> dict[str, int]:
    _check_out(out)
    policy = _policy_of(run_dir)
    decode = load_decoder(policy.model, policy.revision)
    journal = run_dir / JOURNAL_FILE
    if not journal.exists():
        raise TrajectoryExportError(f"{journal} does not exist, so no episode is known")
    # Written beside it: a partial export must not look complete.
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with open_read_only(journal) as db:
            episodes = KeptEpisodes(db, run_dir, decode)
            total = episodes.count(wanted)
            if not total:
                raise TrajectoryExportError(explain_no_match(db, wanted, run_dir.name))
            rows = _report_progress(episodes.find_rows(wanted), total)
            count = _write(form, rows, temporary, run_dir.name)
        if not count:
            raise TrajectoryExportError(
                f"the tokens of all {total} matching attempts were pruned with checkpoints, and no"
                " dump has them: raise learner.dumps.keep for the next run"
            )
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"rows": count, "pruned": episodes.pruned}


def _write(form: str, rows: Iterator[Row], out: Path, run_id: str) -> int:
    try:
        from services.learner.dumps.adapters.parquet_files import write_dataset, write_parquet
    except ImportError as error:
        raise TrajectoryExportError(
            f"{error}: install it, for instance with {install_command('export')}"
        ) from error
    if form == "datasets":
        return write_dataset(rows, out, run_id)
    return write_parquet(rows, out)


def _report_progress(rows: Iterator[Row | None], total: int) -> Iterator[Row]:
    """Pass on kept rows, and print the progress."""
    reported = time.monotonic()
    for done, row in enumerate(rows, 1):
        if row is not None:
            yield row
        if time.monotonic() - reported > _REPORT_S:
            print_json({"done": done, "of": total})
            reported = time.monotonic()


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrajectoryExportError(f"{out} already exists: choose another folder, or remove it")


def _policy_of(run_dir: Path) -> PolicyConfig:
    path = run_dir / "spec.json"
    try:
        spec: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrajectoryExportError(
            f"{path} cannot be read, so the run's tokenizer is unknown: {error}"
        ) from error
    return parse_shared(spec, where=str(path)).policy


if __name__ == "__main__":
    refuse_core_dumps()
    sys.exit(main())
