"""Downloads of single archives from the registries that pip's and npm's users have configured."""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

# Between two bytes; a large archive takes as long as it takes.
_SILENCE_S = 60.0
_COMMAND_S = 120.0
# By itself npm waits for minutes where there is no network.
_NPM_OPTIONS = (
    "--json",
    "--fetch-retries=1",
    "--fetch-retry-mintimeout=1000",
    "--fetch-retry-maxtimeout=5000",
)


class RegistryError(Exception):
    """A package cannot be had, or is not the one that is wanted."""


def fetch_archive(registry: str, package: str, version: str, to: Path) -> None:
    """Save the archive of one version of a package. Raises RegistryError."""
    find = {"pypi": _find_in_pypi, "npm": _find_in_npm}[registry]
    url = find(package, version)
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response, to.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
    except (OSError, urllib.error.URLError) as error:
        raise RegistryError(f"{package} {version} could not be downloaded: {error}") from error


def _find_in_pypi(package: str, version: str) -> str:
    """Return where a wheel is, or the source where there is none. Neither is built or run."""
    uv = Path(sys.executable).parent / "uv"
    command = (str(uv), "pip", "compile", "-", "--no-deps", "--universal", "--quiet")
    # In an empty folder: what this project overrides is not for other packages.
    with tempfile.TemporaryDirectory() as folder:
        lock = _run((*command, "--format", "pylock.toml"), folder, f"{package}=={version}")
    found = tomllib.loads(lock)["packages"][0]
    return (found.get("wheels") or [found["sdist"]])[0]["url"]


def _find_in_npm(package: str, version: str) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise RegistryError(f"{package} is a package of npm's, and npm is not installed")
    # In an empty folder: a package.json nearby has no say.
    with tempfile.TemporaryDirectory() as folder:
        answer = _run((npm, "view", f"{package}@{version}", "dist.tarball", *_NPM_OPTIONS), folder)
    return json.loads(answer or "null") or _refuse(f"npm knows no {package} {version}")


def _refuse(why: str) -> str:
    raise RegistryError(why)


def _run(command: tuple[str, ...], folder: str, text: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
            check=True,
            timeout=_COMMAND_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RegistryError(f"{Path(command[0]).name} failed: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RegistryError(f"{Path(command[0]).name} failed: {error.stderr.strip()}") from error
    return done.stdout
