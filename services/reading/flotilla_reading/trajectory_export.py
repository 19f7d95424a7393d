"""Export of a run's episodes as Parquet, or as a folder for Hugging Face's `datasets`."""

import shutil
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from flotilla_common.adapters.token_text import NoTokenizerError, load_decoder
from flotilla_common.files.json_files import read_json_object
from flotilla_common.process.extras import install_command
from flotilla_common.run_folder.dump_files import picture_name
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.spec.spec import PolicyConfig, parse_shared
from flotilla_reading.attempt_filter import AttemptFilter, explain_no_match
from flotilla_reading.kept_episodes import KeptEpisodes, Row

# Folder of the pictures, in the folder of an export.
PICTURES = "pictures"


class TrajectoryExportError(Exception):
    """Nothing can be exported; the message gives the reason and the remedy."""


class Exported(NamedTuple):
    """Number of rows written, and of attempts left out because their tokens are not kept."""

    rows: int
    pruned: int


def export_trajectories(
    run_dir: Path,
    out: Path,
    form: Literal["parquet", "datasets"],
    wanted: AttemptFilter,
    show_progress: Callable[[int, int], object],
) -> Exported:
    """Write the matching episodes of a run to `out`, which must not exist. `show_progress` gets the
    number of attempts read, and of all.

    Raises TrajectoryExportError, JournalError, ConfigError or OSError; then
    nothing is left behind."""
    _check_out(out)
    # Written beside it: a partial export must not look complete.
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with open_episodes(run_dir) as (db, episodes):
            total = episodes.count(wanted)
            if not total:
                raise TrajectoryExportError(explain_no_match(db, wanted, run_dir.name))
            rows = _pass_kept(episodes.find_rows(wanted), lambda done: show_progress(done, total))
            shown = _write_pictures(rows, episodes, temporary / PICTURES)
            count = _write(form, shown, temporary, run_dir.name)
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
    return Exported(count, episodes.pruned)


@contextmanager
def open_episodes(run_dir: Path) -> Generator[tuple[sqlite3.Connection, KeptEpisodes]]:
    """Open a run's journal; yield it with its episodes. Raises TrajectoryExportError, JournalError
    or ConfigError."""
    policy = _policy_of(run_dir)
    try:
        decode = load_decoder(policy.model, policy.revision)
    except NoTokenizerError as error:
        raise TrajectoryExportError(str(error)) from error
    journal = run_dir / JOURNAL_FILE
    if not journal.exists():
        raise TrajectoryExportError(f"{journal} does not exist, so no episode is known")
    with open_read_only(journal) as db:
        yield db, KeptEpisodes(db, run_dir, decode)


def _write(form: str, rows: Iterator[Row], out: Path, run_id: str) -> int:
    try:
        from flotilla_reading.adapters.parquet_files import write_dataset, write_parquet
    except ImportError as error:
        raise TrajectoryExportError(
            f"{error}: install it, for instance with {install_command('export')}"
        ) from error
    if form == "datasets":
        return write_dataset(rows, out, run_id)
    return write_parquet(rows, out)


def _pass_kept(rows: Iterator[Row | None], show_done: Callable[[int], object]) -> Iterator[Row]:
    for done, row in enumerate(rows, 1):
        if row is not None:
            yield row
        show_done(done)


def _write_pictures(rows: Iterator[Row], episodes: KeptEpisodes, folder: Path) -> Iterator[Row]:
    """Pass rows on, and write the pictures that they show to a folder, each once."""
    for row in rows:
        for item in (item for each in row["sequences"] for item in each.get("pictures", ())):
            path = folder / picture_name(item["sha256"], item["mime"])
            # A dump that was changed may name another place.
            if path.exists() or path.parent != folder:
                continue
            data = episodes.find_picture(row, item["sha256"], item["mime"])
            if data is not None:
                folder.mkdir(exist_ok=True)
                path.write_bytes(data)
        yield row


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrajectoryExportError(f"{out} already exists: choose another folder, or remove it")


def _policy_of(run_dir: Path) -> PolicyConfig:
    path = run_dir / "spec.json"
    try:
        spec = read_json_object(path)
    except ValueError as error:
        raise TrajectoryExportError(f"the run's tokenizer is unknown: {error}") from error
    return parse_shared(spec, where=str(path)).policy
