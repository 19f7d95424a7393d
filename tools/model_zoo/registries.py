"""Downloads of single archives from the registries configured for pip and npm."""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

# Longest silence of a server; a large archive may take longer in total.
_SILENCE_S = 60.0
_COMMAND_S = 120.0
# By default, npm waits for minutes without a network.
_NPM_OPTIONS = (
    "--json",
    "--fetch-retries=1",
    "--fetch-retry-mintimeout=1000",
    "--fetch-retry-maxtimeout=5000",
)


class RegistryError(Exception):
    """A package is not available, or has another hash than expected."""


def fetch_archive(registry: str, package: str, version: str, to: Path) -> None:
    """Save the archive of one version of a package. Raises RegistryError."""
    find = {"pypi": _find_in_pypi, "npm": _find_in_npm}[registry]
    url = find(package, version)
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response, to.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
    except (OSError, urllib.error.URLError) as error:
        raise RegistryError(f"cannot download {package} {version}: {error}") from error


def _find_in_pypi(package: str, version: str) -> str:
    """Return the URL of a wheel, or of the source if there is none. Neither is built or run."""
    uv = Path(sys.executable).parent / "uv"
    command = (str(uv), "pip", "compile", "-", "--no-deps", "--universal", "--quiet")
    # In an empty folder: this project's overrides must not apply.
    with tempfile.TemporaryDirectory() as folder:
        lock = _run((*command, "--format", "pylock.toml"), folder, f"{package}=={version}")
    found = tomllib.loads(lock)["packages"][0]
    return (found.get("wheels") or [found["sdist"]])[0]["url"]


def _find_in_npm(package: str, version: str) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise RegistryError(f"{package} is an npm package, but npm is not installed")
    # In an empty folder: a package.json nearby must not apply.
    with tempfile.TemporaryDirectory() as folder:
        answer = _run((npm, "view", f"{package}@{version}", "dist.tarball", *_NPM_OPTIONS), folder)
    return json.loads(answer or "null") or _refuse(f"npm has no {package} {version}")


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
