"""Prepares the first start of a box: packages, a user, and the downloads of its nodes."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

from tests.sky.box.layout import ROOT, Layout

# The Debian package of each program that a box starts.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
_POLICY = Path("/usr/sbin/policy-rc.d")
_SYSTEM_PYTHON = "/usr/bin/python3"
# SkyPilot installs these on a node at its first launch: a Slurm node, and a cloud's machine.
RUNTIMES = {
    "runtime-slurm": "requirements-slurm-node.txt",
    "runtime-machine": "requirements-machine.txt",
}


class BoxError(Exception):
    """A box cannot run here; the message names the fix."""


def missing_packages() -> list[str]:
    where = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    found = {name for name in PACKAGES if shutil.which(name, path=where)}
    return sorted({package for name, package in PACKAGES.items() if name not in found})


def require() -> None:
    """Raise unless this process may make namespaces and every program is here."""
    if os.geteuid() != 0:
        raise BoxError("a box needs root, because it makes namespaces: run it with sudo")
    if missing := missing_packages():
        raise BoxError(
            "Debian packages are missing: "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
            " (or: python -m tests.sky.box install)"
        )
    if not Path(_SYSTEM_PYTHON).exists():
        raise BoxError(f"{_SYSTEM_PYTHON} is missing: apt-get install python3")


def install() -> list[str]:
    """Install the missing Debian packages, without starting a daemon; return their names."""
    missing = missing_packages()
    if not missing:
        return []
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise BoxError(f"root and apt-get are needed to install {' '.join(missing)}")
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        _run("apt-get", "update", "-qq")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing, env=quiet)
    finally:
        if ours:
            _POLICY.unlink()
    return missing


def prepare(layout: Layout) -> None:
    """Make the user and the nodes' Python environments, where they do not exist yet."""
    require()
    layout.base.mkdir(parents=True, exist_ok=True)
    layout.base.chmod(0o755)
    _make_user(layout)
    layout.shim.mkdir(exist_ok=True)
    if layout.runtimes:
        _make_runtimes(layout)


def _make_runtimes(layout: Layout) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if uv is None:
        raise BoxError("uv is missing: it comes with `make sky`")
    if not (layout.shim / "uv.real").exists():
        shutil.copy(uv, layout.shim / "uv.real")
    for name, requirements in RUNTIMES.items():
        _make_runtime(layout, name, ROOT / "tests/sky" / requirements)
    _hook(layout.base / "runtime-machine")


def _make_user(layout: Layout) -> None:
    try:
        entry = pwd.getpwnam(layout.user)
    except KeyError:
        # '*' is no password, but unlike '!' it does not lock the account for sshd.
        home = str(layout.home)
        _run("useradd", "-M", "-d", home, "-s", "/bin/bash", "-p", "*", layout.user)
        return
    if entry.pw_dir != str(layout.home):
        _run("usermod", "-d", str(layout.home), layout.user)


def _make_runtime(layout: Layout, name: str, requirements: Path) -> None:
    done = layout.base / f"{name}.from"
    if done.exists() and done.read_text() == requirements.read_text():
        return
    folder, uv = layout.base / name, str(layout.shim / "uv.real")
    shutil.rmtree(folder, ignore_errors=True)
    variables = {**os.environ, "UV_CACHE_DIR": str(layout.base / "uv-cache")}
    options = ("--quiet", "--seed", "--relocatable", "--python", _SYSTEM_PYTHON)
    _run(uv, "venv", *options, str(folder), env=variables)
    variables["VIRTUAL_ENV"] = str(folder)
    _run(uv, "pip", "install", "--quiet", "--no-deps", "-r", str(requirements), env=variables)
    _run("chown", "-R", f"{layout.user}:", str(folder), str(layout.base / "uv-cache"))
    done.write_text(requirements.read_text())


def _hook(runtime: Path) -> None:
    """Let every Python of this runtime import `machine_hook` first."""
    [packages] = runtime.glob("lib/python3.*/site-packages")
    shutil.copy(ROOT / "tests/sky/machine_hook.py", packages / "machine_hook.py")
    (packages / "machine_hook.pth").write_text("import machine_hook\n")


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    except subprocess.CalledProcessError as error:
        raise BoxError(f"`{' '.join(command)}` failed:\n{error.stderr.strip()}") from None
