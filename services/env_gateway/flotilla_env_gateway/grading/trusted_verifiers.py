"""Trusted verifiers: the operator or this repository lists the digests of their sources."""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from flotilla_common.process.own_packages import folder_of
from flotilla_common.rpc.errors import ConfigError

_DIGESTS = "env_gateway.verifiers.digests"
_ENVIRONMENTS = "flotilla_environments"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_trusted(source: str, digests: Collection[str]) -> bool:
    return hashlib.sha256(source.encode()).hexdigest() in digests


def load_digests(path: Path | None) -> frozenset[str]:
    """Load the SHA-256 digests listed in a file, in the format of `sha256sum`. None stands for
    that of our environments, if they are installed. Raises ConfigError if the file cannot be
    read or lists anything else."""
    if path is None:
        folder = folder_of(_ENVIRONMENTS)
        if folder is None:
            return frozenset()
        path = folder / "verifiers.sha256"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{_DIGESTS}: {path}: {error}; it is searched beside the spec, then in {Path.cwd()}."
            " Write the SHA-256 of each verifier's source there, one per line, or remove the key"
        ) from error
    digests = [line.split()[0].lower() for line in lines if line.strip()]
    if wrong := next((word for word in digests if not _SHA256.fullmatch(word)), None):
        raise ConfigError(
            f"{_DIGESTS}: {path}: {wrong!r} is not a SHA-256; write it as sha256sum does"
        )
    return frozenset(digests)
