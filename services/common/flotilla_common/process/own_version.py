"""The version and the commit of this Flotilla, which everything that a run writes names.

A built package knows its commit from its build (services/common/record_commit.py), a checkout
from git."""

import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flotilla_common.process.child_environment import child_environment

UNKNOWN = "unknown"
# This package's own; a checkout is installed as the one that names all others.
_DISTRIBUTIONS = ("flotilla-rl-common", "flotilla-rl")
COMMIT_FILE = "commit.txt"
_GIT_S = 10.0
_DESCRIBE = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


@dataclass(frozen=True, slots=True)
class OwnVersion:
    """A version, and a commit with `-dirty` behind it if files had changed; or `unknown`."""

    version: str
    commit: str

    def __str__(self) -> str:
        return f"flotilla {self.version} (commit {self.commit})"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@cache
def own_version() -> OwnVersion:
    """Return the version and commit of the running program."""
    here = Path(__file__).parents[1]
    number = next(filter(None, map(_version_of, _DISTRIBUTIONS)), UNKNOWN)
    recorded = here / COMMIT_FILE
    if recorded.is_file():
        return OwnVersion(number, recorded.read_text(encoding="utf-8").strip() or UNKNOWN)
    return OwnVersion(number, commit_of_checkout(here.parents[2]))


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def commit_of_checkout(root: Path) -> str:
    """Return the commit of a repository's folder, `unknown` if it is none or git does not tell."""
    if not (root / ".git").exists():
        return UNKNOWN
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *_DESCRIBE],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
            env=child_environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return found.stdout.strip() or UNKNOWN
