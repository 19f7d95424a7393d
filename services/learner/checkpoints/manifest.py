"""What makes a folder a checkpoint: `manifest.json`, which names and hashes its files.

    {"format": 1, "run_id": "demo-20260101-120000", "run_epoch": 2, "step": 40,
     "files": {"model.safetensors": {"sha256": "...", "bytes": 1234}, ...}}

`files` holds every file of the folder but the manifest itself. A folder is whole when each of
them has the size and SHA-256 that the manifest says. Files are safetensors and JSON only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from services.common.errors import ConfigError
from services.learner.checkpoints.durable import sha256_of, write_durably

MANIFEST = "manifest.json"
FORMAT = 1


class DamagedCheckpointError(Exception):
    """A checkpoint is not what was written; the message names the file and what is wrong."""


class ForeignCheckpointError(ConfigError):
    """A checkpoint is whole but not for this program; the message says what to do."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


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
    """Write and fsync it in its folder; returns its SHA-256 in hex."""
    data = manifest.to_json().encode()
    write_durably(directory / MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Raises DamagedCheckpointError, or ForeignCheckpointError when a newer program wrote it."""
    try:
        data: dict[str, Any] = json.loads(text)
        found = data["format"]
        if found == FORMAT:
            files = {inside(name): FileEntry(**entry) for name, entry in data["files"].items()}
            return Manifest(data["run_id"], int(data["run_epoch"]), int(data["step"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{where} is no manifest: {error!r}") from error
    raise ForeignCheckpointError(
        f"{where} has format {found}, this program reads and writes {FORMAT}: go on with the"
        " version of the program that wrote it"
    )


def verify(directory: Path) -> Manifest:
    """Read every file of a checkpoint folder and compare it with the manifest.

    Raises DamagedCheckpointError or ForeignCheckpointError.
    """
    path = directory / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    for name, entry in manifest.files.items():
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise DamagedCheckpointError(f"{directory / name} is a link to elsewhere")
        _verify_file(directory / name, entry)
    return manifest


def inside(name: str) -> str:
    """The name of a file below the folder that names it. Raises ValueError for any other."""
    path = PurePosixPath(name)
    if path.is_absolute() or {"..", "."} & {*path.parts, name} or str(path) != name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file below its folder")
    return name


def _verify_file(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise DamagedCheckpointError(f"{path} has {size} bytes instead of {entry.bytes}")
        if sha256_of(path) != entry.sha256:
            raise DamagedCheckpointError(f"{path} has changed")
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
