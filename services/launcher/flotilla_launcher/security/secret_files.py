"""Secret files that pass secrets from the watcher's environment to the service, in a private
folder.

Every child inherits an environment, and crash handlers and debuggers show it. A file is read
once, by the process that gets its name."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.arguments import TOKEN_VARIABLE, read_token
from flotilla_common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls, read_tls
from flotilla_common.text.redaction import add_secret


@dataclass(frozen=True, slots=True)
class SecretFiles:
    """Secrets of this unit, and the service arguments that refer to them."""

    token: str
    tls: Tls | None
    folder: Path
    arguments: tuple[str, ...]


@contextmanager
def secrets_in_files() -> Generator[SecretFiles]:
    """Move token and TLS from the environment into files while the block runs.

    Raises ConfigError if the token is missing or a value is invalid."""
    token, tls = read_token(None), read_tls(None)
    del os.environ[TOKEN_VARIABLE]
    add_secret(token)
    # mkdtemp makes it 0700.
    folder = Path(tempfile.mkdtemp(prefix="flotilla-"))
    try:
        yield SecretFiles(token, tls, folder, _write_files(folder, token, tls))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path, token: str, tls: Tls | None) -> tuple[str, ...]:
    write_secret(folder / "token", token.encode())
    arguments = ("--token-file", str(folder / "token"))
    if tls is None:
        return arguments
    write_tls(folder, tls)
    return (*arguments, "--tls-dir", str(folder))


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    replace_file(path, content, mode=0o600)


def write_tls(folder: Path, tls: Tls) -> None:
    """Write the files of a service's identity, as --tls-dir names their folder."""
    contents = {CA_FILE: tls.ca, CERTIFICATE_FILE: tls.certificate, KEY_FILE: tls.key}
    for name, content in contents.items():
        write_secret(folder / name, content)
