"""Layout of a run's files in the store, and rules for which of them count; pure.

    epochs/e000003-INCARNATION.json    a learner began epoch 3, and at which step
    checkpoints/e000003-s000020/...    files of the checkpoint that epoch 3 made at step 20
    manifests/e000003-s000020.json     written once all of them are there
    progress/e000003.json              progress of epoch 3, to count what a lost disk held

A checkpoint exists once its manifest does. Epochs fence each other: what an epoch made after
the step at which a later one began is no longer part of the run, whenever it was written."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from flotilla_learner.run_files.checkpoint_manifest import check_relative_name

FORMAT = 1
MANIFESTS, CHECKPOINTS, EPOCHS, PROGRESS = "manifests", "checkpoints", "epochs", "progress"
# Folders of a checkpoint: the ranks' own files, and those of the run.
RANK_FOLDER = "ranks"
JOURNAL, SPEC = "journal.sqlite", "spec.json"

_STAMP = re.compile(r"e(\d{6,})-s(\d{6,})")
_MARKER = re.compile(r"e(\d{6,})-([0-9A-Za-z-]+)")


class LayoutError(ValueError):
    """A file in the store does not match its name; the message gives the reason."""


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """Name of a remote checkpoint. Readers take the highest valid one."""

    run_epoch: int
    step: int

    def __str__(self) -> str:
        return f"e{self.run_epoch:06d}-s{self.step:06d}"

    @property
    def manifest(self) -> str:
        return f"{MANIFESTS}/{self}.json"

    @property
    def folder(self) -> str:
        return f"{CHECKPOINTS}/{self}"

    @classmethod
    def from_text(cls, text: str) -> "Stamp | None":
        """Parse the text of a stamp; return None for anything else."""
        found = _STAMP.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a checkpoint: SHA-256 hex and length."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """All files of one checkpoint, by their names below its folder."""

    stamp: Stamp
    run_id: str
    schema_version: str
    # Tries that the journal in it had acknowledged.
    acknowledged: int
    files: Mapping[str, RemoteFile]

    def encode(self) -> bytes:
        return _json({"format": FORMAT, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Marker:
    """Record that a learner began an epoch, replayed up to `forked_step`."""

    run_epoch: int
    incarnation: str
    forked_step: int

    @property
    def name(self) -> str:
        return f"{EPOCHS}/e{self.run_epoch:06d}-{self.incarnation}.json"

    def encode(self) -> bytes:
        return _json(asdict(self))


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an epoch: tries that its journal acknowledged, and steps planned."""

    run_epoch: int
    acknowledged: int
    step: int

    @property
    def name(self) -> str:
        return f"{PROGRESS}/e{self.run_epoch:06d}.json"

    def encode(self) -> bytes:
        return _json(asdict(self))


def decode_manifest(data: bytes, stamp: Stamp) -> RemoteManifest:
    """Decode a manifest. Raises LayoutError if it is torn, foreign, or names files outside its
    folder."""
    try:
        fields: Any = json.loads(data)
        made_as = fields["format"]
        own = Stamp(int(fields["stamp"]["run_epoch"]), int(fields["stamp"]["step"]))
        facts = (str(fields["run_id"]), str(fields["schema_version"]), int(fields["acknowledged"]))
        files = {
            check_relative_name(str(name)): RemoteFile(str(file["sha256"]), int(file["size_bytes"]))
            for name, file in fields["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"not a manifest: {error!r}") from error
    if made_as != FORMAT:
        raise LayoutError(f"has format {made_as!r}, but this learner reads {FORMAT}")
    if own != stamp:
        raise LayoutError(f"it is the manifest of {own}")
    return RemoteManifest(stamp, *facts, files)


def decode_marker(data: bytes, name: str) -> Marker:
    """Decode a file under `epochs/`; use only its name if its writer was cut off."""
    run_epoch, incarnation = marker_of(name) or (0, "")
    try:
        return Marker(run_epoch, incarnation, int(json.loads(data)["forked_step"]))
    except (ValueError, KeyError, TypeError):
        # A writer that was cut off here has trained nothing, so it replaces nothing.
        return Marker(run_epoch, incarnation, 2**62)


def decode_progress(data: bytes) -> Progress | None:
    """Decode a progress file; return None if it was cut off."""
    try:
        fields: Any = json.loads(data)
        return Progress(*(int(fields[n]) for n in ("run_epoch", "acknowledged", "step")))
    except (ValueError, KeyError, TypeError):
        return None


def marker_of(name: str) -> tuple[int, str] | None:
    """Return run epoch and incarnation of a marker, from its name."""
    found = _MARKER.fullmatch(PurePosixPath(name).stem)
    return (int(found[1]), found[2]) if found else None


def stamps(names: Iterable[str]) -> list[Stamp]:
    """Return the stamps of the manifests, oldest first."""
    found = (Stamp.from_text(PurePosixPath(n).stem) for n in names if n.endswith(".json"))
    return sorted(stamp for stamp in found if stamp is not None)


def surviving(found: Iterable[Stamp], markers: Collection[Marker]) -> list[Stamp]:
    """Return the stamps that belong to the run, oldest first: no later epoch began before their
    step."""
    return sorted(
        stamp
        for stamp in found
        if all(m.run_epoch <= stamp.run_epoch or stamp.step <= m.forked_step for m in markers)
    )


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()
