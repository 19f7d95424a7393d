"""Manifest of a checkpoint folder: `manifest.json`, which names and hashes its files.

    {"format": 2, "run_id": "demo-20260101-120000", "run_epoch": 2, "step": 40,
     "files": {"rank.json": {"sha256": "...", "bytes": 1234}, ...}}

`files` lists every file of the folder but the manifest itself. A folder is intact if each of
them has the listed size and SHA-256. Files are safetensors and JSON only."""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flotilla_common.files.durable_files import sha256_of, write_durably
from flotilla_common.rpc.errors import ConfigError

MANIFEST = "manifest.json"
# The only other file of a checkpoint whose model is at a Tinker service: its address there.
HOSTED_STATE = "tinker.json"
# Format of the folder: 1 had one file for the model and one for the optimizer; 2 has the files
# of all ranks.
FORMAT = 2
# Limits of file systems on a name, and of Linux on a path.
_NAME_BYTES, _PATH_BYTES = 255, 2048
# Errors from JSON of any other shape, such as an endless number or 100,000 brackets.
_MALFORMED = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)


class DamagedCheckpointError(Exception):
    """A checkpoint differs from what was written; the message names the file and the problem."""


class ForeignCheckpointError(ConfigError):
    """A checkpoint is intact but was written by another version of the program; the message
    gives the remedy."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        """Raises TypeError."""
        if type(self.sha256) is not str or type(self.bytes) is not int:
            raise TypeError('"sha256" must be a string and "bytes" an integer')


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`; `files` by name."""

    run_id: str
    run_epoch: int
    step: int
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def write_manifest(directory: Path, manifest: Manifest) -> str:
    """Write and fsync a manifest in its folder; return its SHA-256 in hex."""
    data = manifest.to_json().encode()
    write_durably(directory / MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Parse a manifest.

    Raises DamagedCheckpointError, or ForeignCheckpointError if a newer program wrote it."""
    try:
        data: dict[str, Any] = json.loads(text)
        found = data["format"]
        if found == FORMAT:
            files = {
                check_relative_name(name): FileEntry(**entry)
                for name, entry in data["files"].items()
            }
            numbers = int(data["run_epoch"]), int(data["step"])
            return Manifest(_text(data["run_id"]), *numbers, files)
    except _MALFORMED as error:
        raise DamagedCheckpointError(f"{where} is not a manifest: {error!r}") from error
    raise ForeignCheckpointError(
        f"{where} has format {found}, but this program reads and writes {FORMAT}: use the"
        " version of the program that wrote it"
    )


def verify_checkpoint(directory: Path) -> Manifest:
    """Read every file of a checkpoint folder and compare it with the manifest.

    Raises DamagedCheckpointError or ForeignCheckpointError.
    """
    path = directory / MANIFEST
    try:
        _check_regular(path)
        manifest = parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    for name, entry in manifest.files.items():
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise DamagedCheckpointError(f"{directory / name} is a link to elsewhere")
        _verify_file(directory / name, entry)
    return manifest


def check_relative_name(name: str) -> str:
    """Return `name` unchanged if it is a relative path below its folder. Raises ValueError
    otherwise."""
    path = PurePosixPath(name)
    elsewhere = path.is_absolute() or {"..", "."} & {*path.parts, name} or str(path) != name
    if elsewhere or not _fits(path):
        raise ValueError(f"{name[:_NAME_BYTES]!r} is not the name of a file below its folder")
    return name


def _fits(path: PurePosixPath) -> bool:
    """Return True if the file system allows the name."""
    try:
        lengths = [len(part.encode()) for part in path.parts]
    except UnicodeEncodeError:
        return False
    return "\0" not in str(path) and max(lengths) <= _NAME_BYTES and sum(lengths) <= _PATH_BYTES


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is not a string")


def _check_regular(path: Path) -> int:
    """Return the size of a regular file. Opening a pipe would block until something writes."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(f"{path} is not a regular file")
    return found.st_size


def _verify_file(path: Path, entry: FileEntry) -> None:
    try:
        size = _check_regular(path)
        if size != entry.bytes:
            raise DamagedCheckpointError(f"{path} has {size} bytes instead of {entry.bytes}")
        if sha256_of(path) != entry.sha256:
            raise DamagedCheckpointError(f"{path} has changed")
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
