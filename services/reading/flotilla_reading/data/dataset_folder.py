"""A folder of prepared data: `train`, `eval` and a manifest, which says what they were made from
and how, and what became of every task of the source. Nothing in it depends on the time or the
machine: one Flotilla makes the same bytes of the same source and wishes."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import sha256_of, sync_path, write_durably
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.own_version import own_version
from flotilla_common.tasks.data_manifest import FORMAT, MANIFEST, read_manifest
from flotilla_common.tasks.task_digests import question_digest
from flotilla_common.tasks.task_files import ReadTask
from flotilla_reading.data.entries import DataError, Prepared
from flotilla_reading.data.preparation import Wishes
from flotilla_reading.data.row_files import FileFormat, format_tasks, read_task_file
from flotilla_reading.data.split import KeptSplit

PARTS = ("train", "eval")
_SCRATCH = ".flotilla-data-"


@dataclass(frozen=True, slots=True)
class Origin:
    """A file next to the source that data were made from."""

    path: str
    sha256: str

    def to_dict(self) -> dict[str, str]:
        return {"path": self.path, "sha256": self.sha256}


def origin_of(path: Path, data: bytes) -> Origin:
    return Origin(str(path), hashlib.sha256(data).hexdigest())


def describe(
    prepared: Prepared, wishes: Wishes, source: Mapping[str, Any], quarantine: Origin | None
) -> dict[str, Any]:
    """Return the manifest of prepared data, without its files. `source` is what it has of the
    source, see `sources.Fetched`."""
    kept = wishes.kept
    return {
        "format": FORMAT,
        "written_by": own_version().to_dict(),
        "source": source,
        "filters": {
            "modality": wishes.selection.modality,
            "env": list(wishes.selection.envs),
            "difficulty": list(wishes.selection.difficulty),
            "max_tasks": wishes.selection.max_tasks,
            "default_env": wishes.defaults.env,
            "strict": wishes.strict,
            "allow": sorted(wishes.allow),
        },
        "split": {
            "eval_ratio": str(wishes.split.ratio),
            "eval_min": wishes.split.least,
            "eval_max": wishes.split.most,
            "max_eval": wishes.split.max_eval,
            "held_out": list(wishes.split.held_out),
            "max_env_share": None if wishes.max_env_share is None else str(wishes.max_env_share),
        },
        "keep_split": kept and {"path": kept.path, "sha256": kept.sha256},
        "quarantine": quarantine
        and {
            **quarantine.to_dict(),
            "rules": [
                {**rule.to_dict(), "tasks": tasks}
                for rule, tasks in zip(wishes.quarantine, prepared.matches, strict=True)
            ],
        },
        "counts": {
            "source": prepared.rows,
            "train": len(prepared.train),
            "eval": len(prepared.eval),
            "dropped": dict(sorted(Counter(each.reason for each in prepared.dropped).items())),
        },
        "environments": count_by_env(prepared),
        "tasks": {
            "train": {entry.key: entry.digest for entry in prepared.train},
            "eval": {entry.key: entry.digest for entry in prepared.eval},
        },
        "dropped": [
            {
                "place": each.place,
                "key": each.key,
                "env": each.env_key,
                "reason": each.reason,
                "detail": each.detail,
            }
            for each in prepared.dropped
        ],
    }


def count_by_env(prepared: Prepared) -> dict[str, dict[str, int]]:
    """Return what became of the rows of each environment: `train`, `eval`, or the reason."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part, entries in (("train", prepared.train), ("eval", prepared.eval)):
        for entry in entries:
            counts[entry.env_key][part] += 1
    for each in prepared.dropped:
        counts[each.env_key][each.reason] += 1
    return {env: dict(sorted(found.items())) for env, found in sorted(counts.items())}


def check_out(out: Path) -> None:
    """Raise DataError if a folder may not be written or replaced: it holds something that
    `flotilla data prepare` did not write, or that was changed since."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is not a folder")
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return
    remedy = "choose another folder, or remove it"
    if MANIFEST not in names:
        raise DataError(f"{out} holds something else ({names[0]}): {remedy}")
    files = _read_files(out)
    for name in names:
        if name != MANIFEST and name not in files:
            raise DataError(f"{out} holds something else ({name}): {remedy}")
        if name in files and sha256_of(out / name) != files[name]:
            raise DataError(f"{out / name} was changed since it was prepared: {remedy}")


def refuse_inside(source: str, out: Path) -> None:
    """Raise DataError if a source is a file in the folder to write: it would be lost there."""
    path = Path(source)
    if path.exists() and path.resolve().is_relative_to(out.resolve()):
        raise DataError(f"{source} is in {out}, whose files are replaced: choose another folder")


def write_folder(out: Path, prepared: Prepared, manifest: dict[str, Any], form: FileFormat) -> None:
    """Write the folder under another name, and then rename it. A folder that was prepared before
    is replaced; killed between the two renames, it is gone, never mixed. Raises DataError."""
    try:
        _write_folder(out.resolve(), prepared, manifest, form)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error


def _write_folder(
    out: Path, prepared: Prepared, manifest: dict[str, Any], form: FileFormat
) -> None:
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Not by the folder's own name: a scratch folder removes abandoned ones that begin like it.
    with scratch_folder(_SCRATCH, out.parent) as (scratch, _):
        made = scratch / "made"
        made.mkdir()
        files: dict[str, Any] = {}
        for part, entries in zip(PARTS, (prepared.train, prepared.eval), strict=True):
            content = format_tasks(entries, form)
            name = f"{part}.{form}"
            write_durably(made / name, content)
            files[name] = {"tasks": len(entries), "sha256": hashlib.sha256(content).hexdigest()}
        # All in ASCII: a row that was dropped may hold what is not text.
        text = json.dumps({**manifest, "files": files}, indent=1) + "\n"
        write_durably(made / MANIFEST, text.encode())
        sync_path(made)
        if out.exists():
            out.rename(scratch / "replaced")
        made.rename(out)
    sync_path(out.parent)


def read_parts(path: Path) -> dict[str, list[ReadTask]]:
    """Return the tasks of a prepared folder by part, or those of a task file as its one part "".

    Raises DataError or TaskFileError, also for a file that differs from its manifest."""
    if not path.is_dir():
        return {"": list(read_task_file(path))}
    parts: dict[str, list[ReadTask]] = {}
    for name, sha256 in _read_files(path).items():
        file = path / name
        parts[Path(name).stem] = list(read_task_file(file, may_be_empty=True))
        if sha256_of(file) != sha256:
            raise DataError(f"{file} was changed since it was prepared: prepare the data again")
    return parts


def _read_files(folder: Path) -> dict[str, Any]:
    """Return the SHA-256 of each file of a prepared folder, as its manifest has them. Raises
    DataError or TaskFileError."""
    path = folder / MANIFEST
    try:
        return {name: about["sha256"] for name, about in read_manifest(path)["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no manifest of prepared data: {error!r}") from error


def read_kept_split(folder: Path) -> KeptSplit:
    """Return the split of a prepared folder. Raises DataError or TaskFileError."""
    # Says what is missing, where `read_parts` would read a file.
    read_manifest(folder / MANIFEST)
    parts = {
        part: [(read.task.key, question_digest(read.task)) for read in tasks]
        for part, tasks in read_parts(folder).items()
    }
    return KeptSplit(
        *(str(folder), sha256_of(folder / MANIFEST)),
        {key: part for part, found in parts.items() for key, _ in found},
        {question: part for part, found in parts.items() for _, question in found},
    )
