"""Store of a run's checkpoints on any file system that fsspec supports."""

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text.redaction import add_secret, redact
from flotilla_learner.config.learner import REMOTE_OPTIONS_VARIABLE
from flotilla_learner.ports import RemoteStoreError, RemoteStoreRefusedError

# Size of a part of a file in memory; the number of parts at once. S3 allows 10,000 parts a file.
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_MAX_PARTS = 5_000
# Vendors' errors for missing credentials, by class name. A TypeError is an option that the file
# system does not know.
_REFUSALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
_S3 = ("s3", "s3a")


class FsspecStore:
    """Store of one run's checkpoints. Implements `ports.RemoteStore`; use `open_store`."""

    def __init__(self, files: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        self._files: Any = files
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._is_s3 = bool(set(_protocol_names(files)) & set(_S3))

    @property
    def url(self) -> str:
        return self._url

    def list_files(self, folder: str) -> list[str]:
        with self._translate_errors(folder):
            self._files.invalidate_cache()
            try:
                found: list[str] = self._files.find(self._full_path(folder))
            except FileNotFoundError:
                # S3 raises this for a bucket, all others for a folder.
                if self._is_s3:
                    raise
                return []
        return sorted(name.removeprefix(f"{self._root}/") for name in found)

    def read(self, name: str) -> bytes | None:
        with self._translate_errors(name):
            try:
                return self._files.cat_file(self._full_path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._translate_errors(name):
            self._make_parent(name)
            self._files.pipe_file(self._full_path(name), data)

    def size(self, name: str) -> int | None:
        with self._translate_errors(name):
            self._files.invalidate_cache()
            try:
                return int(self._files.info(self._full_path(name))["size"])
            except FileNotFoundError:
                return None

    def upload(self, path: Path, name: str, sent: Callable[[int], None]) -> None:
        """See `ports.RemoteStore`. Holds a few parts of a file in memory, never the whole."""
        options: dict[str, Any] = {}
        if self._is_s3:
            part = max(_PART_BYTES, path.stat().st_size // _MAX_PARTS)
            options = {"chunksize": part, "max_concurrency": _PARTS_AT_ONCE}
        with self._translate_errors(name):
            self._make_parent(name)
            self._files.put_file(
                str(path), self._full_path(name), callback=_UploadCallback(sent), **options
            )

    def download(self, name: str, path: Path) -> bool:
        with self._translate_errors(name):
            try:
                self._files.get_file(self._full_path(name), str(path))
            except FileNotFoundError:
                return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with self._translate_errors(name), suppress(FileNotFoundError):
                self._files.rm_file(self._full_path(name))

    def drop_unfinished(self) -> None:
        """See `ports.RemoteStore`: S3 keeps, and charges for, the parts of a file that was never
        completed."""
        if not self._is_s3:
            return
        with self._translate_errors("unfinished uploads"):
            bucket, prefix, _ = self._files.split_path(self._root)
            for part in self._files.list_multipart_uploads(bucket):
                if part["Key"].startswith(f"{prefix}/"):
                    self._files.abort_mpu(bucket, part["Key"], part["UploadId"])

    def _full_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        """Create the parent folder only where folders are real: elsewhere this would create a
        bucket."""
        if not self._is_s3:
            self._files.makedirs(self._files._parent(self._full_path(name)), exist_ok=True)

    @contextmanager
    def _translate_errors(self, name: str) -> Generator[None]:
        """Convert every exception of a vendor into an error of the port that names the file."""
        try:
            yield
        except PermissionError as error:
            raise RemoteStoreRefusedError(
                f"{self._url_of(name)}: no permission: {_error_text(error)}"
            ) from error
        except FileNotFoundError as error:
            raise RemoteStoreRefusedError(
                f"{self._url_of(name)} does not exist: {_error_text(error)}"
            ) from error
        # Every vendor has its own exceptions, without a common base class.
        except Exception as error:
            refused = isinstance(error, TypeError) or type(error).__name__ in _REFUSALS
            kind = RemoteStoreRefusedError if refused else RemoteStoreError
            raise kind(f"{self._url_of(name)}: {_error_text(error)}") from error

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url


class _UploadCallback(Callback):
    """Reports how many bytes were sent."""

    def __init__(self, sent: Callable[[int], None]) -> None:
        super().__init__()
        self._sent = sent

    def relative_update(self, inc: int = 1) -> None:
        self._sent(inc)


def open_store(url: str, options: Mapping[str, str | float | bool]) -> FsspecStore:
    """Open the store at a URL, without contacting it. Raises ConfigError.

    Further options come from a JSON object in FLOTILLA_REMOTE_OPTIONS, and credentials from
    where the vendor looks for them, such as AWS_ACCESS_KEY_ID or ~/.aws."""
    given: dict[str, Any] = {**options, **_secret_options()}
    if url.split("://")[0] in _S3:
        given = {**_s3_defaults(), **given}
    try:
        files, root = url_to_fs(url, **given)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"learner.checkpoint.remote: {url}: {error}") from error
    return FsspecStore(files, root, url)


def _s3_defaults() -> dict[str, Any]:
    return {
        "use_listings_cache": False,
        "skip_instance_cache": True,
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"mode": "standard", "max_attempts": 2},
        },
    }


def _secret_options() -> dict[str, Any]:
    text = os.environ.get(REMOTE_OPTIONS_VARIABLE, "")
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"{REMOTE_OPTIONS_VARIABLE} is not a JSON object")
    for value in options.values():
        add_secret(str(value))
    return options


def _protocol_names(files: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol: Any = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _error_text(error: Exception) -> str:
    return redact(str(error) or type(error).__name__)
