"""Where tasks come from, and what was fetched: the files of a source, pinned to a version."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flotilla_common.process.extras import install_command
from flotilla_common.tasks.task_files import TaskRow, read_bytes
from flotilla_reading.data.conventions import NO_DEFAULTS, Defaults
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.harbor_folders import is_harbor, read_harbor
from flotilla_reading.data.row_files import parse_file

BUCKET_VARIABLE = "S3_DATASET_BUCKET"
FLEET, HUB = "fleet:", "hf://"
# Is told the name of a file, how many bytes of it are here, and how many it has.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source: its name in errors, its content, and what its store calls this version
    of it, "" if nothing."""

    name: str
    data: bytes
    version: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Fetched:
    """The files of a source. `revision` pins all of them, such as a commit of the hub."""

    kind: str
    url: str
    files: Sequence[SourceFile]
    revision: str = ""

    def read_rows(self, defaults: Defaults = NO_DEFAULTS) -> Iterator[TaskRow]:
        """Yield the rows of all files. Raises DataError or TaskFileError."""
        for file in self.files:
            for row in parse_file(file.name, file.data, defaults):
                several = len(self.files) > 1
                yield replace(row, place=f"{file.name}: {row.place}") if several else row

    def to_dict(self) -> dict[str, Any]:
        """Return what a manifest has of it. The SHA-256 of several files is that of the lines that
        `sha256sum` prints for them."""
        found: dict[str, Any] = {"kind": self.kind, "url": self.url}
        if self.revision:
            found["revision"] = self.revision
        if len(self.files) == 1:
            (only,) = self.files
            version = {"version": only.version} if only.version else {}
            return {**found, **version, "sha256": only.sha256}
        lines = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        files = {file.name: {"version": file.version, "sha256": file.sha256} for file in self.files}
        return {**found, "sha256": hashlib.sha256(lines.encode()).hexdigest(), "files": files}


def locate_source(source: str, data_version: str, modality: str, environ: Mapping[str, str]) -> str:
    """Return the source, or where a version of Fleet's tasks lies in it: in its layout,
    VERSION/openenv/all_MODALITY.json below a bucket. Raises DataError."""
    if not data_version:
        if not source:
            raise DataError("name a SOURCE, or a version of Fleet's tasks by --data-version")
        return source
    if source.startswith(FLEET):
        raise DataError(
            "--data-version: Fleet's API has no versions; leave it out, or name a bucket"
        )
    if not modality:
        raise DataError(
            "--data-version: name the modality too, such as --modality tool_use: each has a file"
        )
    root = source or environ.get(BUCKET_VARIABLE, "")
    if not root:
        raise DataError(
            f"--data-version: name the bucket as SOURCE, such as s3://my-datasets, or set"
            f" {BUCKET_VARIABLE}"
        )
    root = root if source or "://" in root else f"s3://{root}"
    return f"{root.rstrip('/')}/{data_version}/openenv/all_{modality}.json"


def fetch_source(source: str, report: Report) -> Fetched:
    """Return the files of a source. Raises DataError or TaskFileError."""
    if source.startswith(FLEET):
        from flotilla_reading.data.adapters.fleet_api import fetch_fleet_tasks

        return fetch_fleet_tasks(source.removeprefix(FLEET))
    if source.startswith(HUB):
        from flotilla_reading.data.adapters.hub_files import fetch_hub_files

        return fetch_hub_files(source)
    if "://" in source:
        return _load_store_adapter(source).fetch_store_files(source, report)
    return _read_local(source)


def _load_store_adapter(source: str) -> Any:
    try:
        from flotilla_reading.data.adapters import store_files
    except ImportError as error:
        raise DataError(f"{source} needs fsspec: {install_command('s3')}") from error
    return store_files


def _read_local(source: str) -> Fetched:
    path = Path(source)
    if not path.is_dir():
        return Fetched("file", source, [SourceFile(source, read_bytes(path))])
    if not is_harbor(path):
        raise DataError(f"{source} is a folder without Harbor tasks (task.toml): name a file in it")
    return Fetched("harbor", source, [SourceFile(source, read_harbor(path))])


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query, which may sign it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
