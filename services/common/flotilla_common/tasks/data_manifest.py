"""The manifest of prepared data, `manifest.json`: what `flotilla data prepare` made them from, and
the digest of every task. A run that names it trains on these tasks and on no others."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.tasks.task_files import ReadTask, TaskFileError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class DataManifest:
    """What a run needs of a manifest: the source, and the digests of tasks by their keys."""

    source: Mapping[str, Any]
    train: Mapping[str, str]
    eval: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """SHA-256 of all keys and digests: equal for equal data, wherever they come from."""
        text = json.dumps([self.train, self.eval], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return all that a manifest has. Raises TaskFileError."""
    try:
        manifest = read_json_object(path)
    except ValueError as error:
        raise TaskFileError(f"{error}; `flotilla data prepare` writes one") from error
    if manifest.get("format") != FORMAT:
        raise TaskFileError(
            f"{path} has format {manifest.get('format')!r}, and this Flotilla reads {FORMAT}:"
            " prepare the data again"
        )
    return manifest


def read_data_manifest(path: Path) -> DataManifest:
    """Return what a run needs of a manifest. Raises TaskFileError."""
    manifest = read_manifest(path)
    try:
        tasks = manifest["tasks"]
        return DataManifest(dict(manifest["source"]), dict(tasks["train"]), dict(tasks["eval"]))
    except (KeyError, TypeError, ValueError) as error:
        raise TaskFileError(f"{path} is no manifest of prepared data: {error!r}") from error


def find_differing(tasks: Iterable[ReadTask], digests: Mapping[str, str]) -> Mapping[str, str]:
    """Return what is wrong with each task that has no digest or another one, by its key."""
    wrong: dict[str, str] = {}
    for read in tasks:
        key = read.task.key
        if key not in digests:
            wrong[key] = "is not in it"
        elif read.digest != digests[key]:
            wrong[key] = "was changed since"
    return wrong
