"""Files of any store that fsspec knows, such as S3, fetched through a cache.

A file is cached by what its store calls its content: a version id or an ETag. So a download that
was interrupted goes on where it stopped, and one of an object that was changed starts again."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from flotilla_common.process.extras import install_command
from flotilla_common.text.redaction import redact
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, Report, SourceFile, without_secrets

_BLOCK = 8 << 20
_S3 = ("s3", "s3a")
_S3_OPTIONS: dict[str, Any] = {
    "use_listings_cache": False,
    "skip_instance_cache": True,
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"mode": "standard", "max_attempts": 3},
    },
}
# What stores call the content of a file, the strictest first; each is another one once the file
# was changed.
_VERSIONS = ("VersionId", "version_id", "generation", "ETag", "etag", "md5Hash", "content_md5")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
_NO_KEYS = (
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    "ProfileNotFound",
)
_CHANGES = 3


class _ChangedError(Exception):
    """The file was changed while it was fetched."""


def fetch_store_files(url: str, report: Report) -> Fetched:
    """Return the file at a URL, or those that match its `*`, in order. Raises DataError."""
    shown = without_secrets(url)
    with _explained_errors(url, shown):
        files, path = _open_store(url)
        paths: list[str] = sorted(files.glob(path)) if "*" in path else [path]
        if not paths:
            raise DataError(f"{shown}: no file matches")
        names = [shown] if len(paths) == 1 else [_short_name(each, path) for each in paths]
        found = [
            _fetch_file(files, each, name, report) for each, name in zip(paths, names, strict=True)
        ]
    return Fetched("store", shown, found)


def _short_name(path: str, pattern: str) -> str:
    """Return a path below what is before the first `*` of a pattern."""
    folder = pattern.split("*")[0].rpartition("/")[0]
    return path.removeprefix(f"{folder}/")


def _open_store(url: str) -> tuple[Any, str]:
    options = _S3_OPTIONS if url.split("://")[0] in _S3 else {}
    try:
        return url_to_fs(url, **options)
    except ImportError as error:
        fix = install_command("s3") if url.split("://")[0] in _S3 else "install what it names"
        raise DataError(f"{without_secrets(url)}: {error}: {fix}") from error


def _fetch_file(files: Any, path: str, name: str, report: Report) -> SourceFile:
    for _ in range(_CHANGES):
        files.invalidate_cache()
        about: Mapping[str, Any] = files.info(path)
        if about["type"] == "directory":
            raise DataError(f"{name} is a folder: name a file in it, or a pattern with *")
        version = _version_of(about)
        try:
            data = _fetch_version(files, path, about, version, partial(report, name))
            return SourceFile(name, data, version)
        except _ChangedError:
            continue
    raise DataError(f"{name} was changed {_CHANGES} times while it was fetched; try again later")


def _version_of(about: Mapping[str, Any]) -> str:
    """Return what changes with a file; "" if its store tells nothing that does."""
    for name in _VERSIONS:
        # S3 calls the only version of an object in a bucket without versions "null".
        if (value := about.get(name)) not in (None, "", "null"):
            return f"{name} {str(value).strip(chr(34))}"
    times = [str(about[name]) for name in _TIMES if about.get(name) is not None]
    return f"modified {times[0]}, {about.get('size')} bytes" if times else ""


def _fetch_version(
    files: Any,
    path: str,
    about: Mapping[str, Any],
    version: str,
    report: Callable[[int, int], None],
) -> bytes:
    """Return one version of a file, from the cache if it is there. Raises _ChangedError."""
    if not version:
        return files.cat_file(path)
    place = _cache_folder() / hashlib.sha256(f"{path}\n{version}".encode()).hexdigest()
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = place.with_suffix(".part")
    with part.open("ab") as file:
        # A second process that fetches the same waits, and then finds it.
        fcntl.flock(file, fcntl.LOCK_EX)
        if not place.exists():
            _append_rest(files, path, file, int(about["size"]), report)
            files.invalidate_cache()
            if _version_of(files.info(path)) != version:
                part.unlink()
                raise _ChangedError
            os.fsync(file.fileno())
            part.rename(place)
    part.unlink(missing_ok=True)
    return place.read_bytes()


def _append_rest(
    files: Any, path: str, file: Any, size: int, report: Callable[[int, int], None]
) -> None:
    """Append what is still missing, a block at a time. Raises _ChangedError."""
    if file.tell() > size:
        file.truncate(0)
    done = file.tell()
    with files.open(path, "rb", block_size=_BLOCK, cache_type="none") as remote:
        remote.seek(done)
        while done < size:
            try:
                block = remote.read(min(_BLOCK, size - done))
            except OSError as error:
                # S3 is asked for this version only, and refuses once there is another.
                if type(error).__name__ == "FileExpired":
                    raise _ChangedError from error
                raise
            if not block:
                raise _ChangedError
            file.write(block)
            file.flush()
            done += len(block)
            report(done, size)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "flotilla" / "data"


@contextmanager
def _explained_errors(url: str, shown: str) -> Generator[None]:
    """Make an error of a vendor's client one that names the URL, and what to do."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        cause = error.__cause__
        # fsspec says so of a server, too.
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise DataError(f"{shown} cannot be reached: {redact(str(cause))}") from error
        raise DataError(f"{shown} does not exist") from error
    # Every vendor has its own exceptions, without a common base class.
    except Exception as error:
        of_key = isinstance(error, PermissionError) or type(error).__name__ in _NO_KEYS
        text = redact(str(error) or type(error).__name__).replace(url, shown)
        raise DataError(f"{shown}: {text}{_key_hint(url) if of_key else ''}") from error


def _key_hint(url: str) -> str:
    if url.split("://")[0] not in _S3:
        return ""
    names = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    there = [name for name in names if os.environ.get(name)]
    return f"; check {' and '.join(there)}" if there else f"; set {' or '.join(names)}"
