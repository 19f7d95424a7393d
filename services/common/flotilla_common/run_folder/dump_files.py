"""Locations of a run's dumps, and how they are written and pruned.

    token_stats/step_000012.npz    token_stats/pruned.jsonl
    rollouts/step_12.jsonl         rollouts/step_12.pictures.zip
    evals/step_20/ENV.jsonl        evals/step_20/aggregated_results.jsonl
    evals/step_20/pictures.zip
    analysis/step_20.{json,md,html}, of the evaluation, by `flotilla_reading.analysis`

A file exists completely or not at all."""

import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flotilla_common.run_folder.token_stats import FOLDER as TOKEN_STATS

ROLLOUTS, EVALS, ANALYSES = "rollouts", "evals", "analysis"
PRUNED = "pruned.jsonl"
AGGREGATED = "aggregated_results.jsonl"
_EVALUATION = re.compile(r"step_(\d+)(?:_eval_only)?")
_STEP = re.compile(r"step_(\d+)\.(?:npz|jsonl|pictures\.zip)")
PICTURES = "pictures.zip"
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg"}


def rollouts_path(run_dir: Path, step: int) -> Path:
    """Return the file of the episodes that a step trained on or left out."""
    return run_dir / ROLLOUTS / f"step_{step}.jsonl"


def pictures_path(run_dir: Path, step: int) -> Path:
    """Return the archive of the pictures that the episodes of a step show."""
    return run_dir / ROLLOUTS / f"step_{step}.{PICTURES}"


def picture_name(sha256: str, mime: str) -> str:
    """Return the name of a picture's file in an archive or a folder."""
    return f"{sha256}{_SUFFIXES.get(mime, '')}"


def eval_folder(run_dir: Path, moment: str, version: int) -> Path:
    """Return the folder of an evaluation; evaluations in mode `eval` have their own
    folder."""
    suffix = "_eval_only" if moment == "eval_only" else ""
    return run_dir / EVALS / f"step_{version}{suffix}"


def env_file(folder: Path, env_key: str) -> Path:
    """Return the file of an environment in an evaluation's folder, `/` written as `_`."""
    return folder / f"{quote(env_key.replace('/', '_'), safe='')}.jsonl"


def find_evaluations(run_dir: Path) -> list[tuple[int, Path]]:
    """List the evaluated versions and their folders, oldest first, whose dumps are complete: the
    aggregated results are written last."""
    found = (path.parent for path in run_dir.glob(f"{EVALS}/step_*/{AGGREGATED}"))
    named = ((_EVALUATION.fullmatch(folder.name), folder) for folder in found)
    return sorted((int(match[1]), folder) for match, folder in named if match)


def write_whole(path: Path, parts: Iterable[bytes]) -> int:
    """Write a file under another name, then rename it; return its size in bytes. If it raises
    OSError, nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    try:
        with temporary.open("wb") as file:
            for part in parts:
                count += file.write(part)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def zip_parts(files: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    """Yield the parts of a ZIP archive of files that are compressed already."""
    parts = _Parts()
    with zipfile.ZipFile(parts, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files:
            # Always the same time, so that the same files give the same archive.
            archive.writestr(zipfile.ZipInfo(name), data)
            yield from parts.take()
    yield from parts.take()


def read_zipped(archive: Path, name: str) -> bytes | None:
    """Return a file of an archive; None if there is no such archive, or file in it, or it is
    damaged."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(name)
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


class _Parts(io.RawIOBase):
    """A file that cannot go back, and gives out what was written to it."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        taken, self._written = self._written, []
        return taken


def json_line(value: Any) -> bytes:
    """Encode a line of UTF-8. Half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def kept_steps(run_dir: Path) -> list[int]:
    """List the steps that have token statistics or episodes, oldest first."""
    found = (_STEP.fullmatch(path.name) for path in _step_files(run_dir))
    return sorted({int(each[1]) for each in found if each})


def prune_steps(run_dir: Path, keep: int) -> Sequence[int]:
    """Remove the files of all but the `keep` newest steps, and record why; return the steps."""
    old = kept_steps(run_dir)[:-keep]
    for step in old:
        for path in _step_files(run_dir):
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) == step:
                path.unlink(missing_ok=True)
    if old:
        why = f"older than the {keep} newest steps (learner.dumps.keep)"
        with (run_dir / TOKEN_STATS / PRUNED).open("ab") as file:
            file.writelines(json_line({"step": step, "reason": why}) for step in old)
    return old


def _step_files(run_dir: Path) -> list[Path]:
    return [path for name in (TOKEN_STATS, ROLLOUTS) for path in (run_dir / name).glob("step_*")]
