"""Tries wheels on a version of Python: `python -m tools.wheel_check FOLDER --python 3.13`.

Each wheel of the folder is installed into an empty environment with what it requires and no extras,
its modules are imported, and its commands print their help. A module may miss only a package that
an extra brings. Packages of others are the newest that the index has, as for any user.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

from packaging.utils import parse_wheel_filename

# By distribution, what comes with its extras, or with the services that use its adapters.
OPTIONAL = {
    "flotilla-rl-common": {
        *("PIL", "httpx", "huggingface_hub", "ray", "s3fs", "tinker", "torch", "transformers"),
    },
    "flotilla-rl-env-gateway": {"flotilla_environments", "fleet", "openenv"},
    "flotilla-rl-environments": {
        *("mcp", "starlette", "uvicorn", "fleet", "cloudpickle", "openenv", "huggingface_hub"),
        *("pyarrow", "rich", "torch", "tokenizers", "numpy", "msgspec"),
        *("flotilla_common", "flotilla_reading", "flotilla_rollout"),
    },
    "flotilla-rl-launcher": {
        *("huggingface_hub", "rich", "tokenizers", "typer", "sky", "flotilla_reading"),
    },
    "flotilla-rl-learner": {"ray", "s3fs", "trackio", "mlflow", "tinker"},
    "flotilla-rl-reading": {"jinja2", "starlette", "uvicorn", "pyarrow", "s3fs", "inspect_ai"},
    "flotilla-rl-rollout": {"vllm", "ray", "tinker", "torch"},
}
_IMPORT_ALL = """
import importlib, json, pkgutil, sys
missing = {}
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = (error.name or "").split(".")[0]
print(json.dumps(missing))
"""
_COMMANDS = """
import sys
from importlib.metadata import distribution
print(*(each.name for each in distribution(sys.argv[1]).entry_points))
"""


class WheelError(Exception):
    """A wheel cannot be installed, imported or started."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel_check", description=__doc__)
    parser.add_argument("folder", type=Path, help="wheels of all distributions")
    parser.add_argument("--python", required=True, help="version, or the path of an interpreter")
    parser.add_argument("--only", default="", help="name of one distribution")
    args = parser.parse_args()
    wheels = sorted(args.folder.glob(f"{args.only.replace('-', '_') or '*'}-*.whl"))
    failed = not wheels
    if failed:
        print(f"error: {args.folder} has no such wheel; run `make dist`", file=sys.stderr)
    for wheel in wheels:
        try:
            print(f"{wheel.name}: {check_wheel(wheel, args.python)}", flush=True)
        except WheelError as error:
            print(f"{wheel.name}: {error}", file=sys.stderr, flush=True)
            failed = True
    return 1 if failed else 0


def check_wheel(wheel: Path, python: str) -> str:
    """Try one wheel, and say what it has. Raises WheelError."""
    distribution = str(parse_wheel_filename(wheel.name)[0])
    packages = top_levels(wheel)
    with tempfile.TemporaryDirectory() as folder:
        uv, interpreter = Path(sys.executable).parent / "uv", Path(folder, "bin/python")
        _run((str(uv), "venv", "--quiet", "--clear", "--python", python, folder), folder)
        install = (str(uv), "pip", "install", "--quiet", "--python", str(interpreter))
        _run((*install, "--find-links", str(wheel.parent.resolve()), str(wheel.resolve())), folder)
        return try_installed(interpreter, distribution, packages)


def try_installed(interpreter: Path, distribution: str, packages: Sequence[str]) -> str:
    """Try a distribution where it is installed, and say what it has. Raises WheelError."""
    folder = str(interpreter.parent)
    missing: dict[str, str] = {}
    for package in packages:
        printed = _run((str(interpreter), "-I", "-c", _IMPORT_ALL, package), folder)
        missing |= json.loads(printed.splitlines()[-1])
    allowed = OPTIONAL.get(distribution, set[str]())
    wrong = [f"{name} needs {what}" for name, what in missing.items() if what not in allowed]
    if wrong:
        raise WheelError("; ".join(wrong))
    commands = _run((str(interpreter), "-I", "-c", _COMMANDS, distribution), folder).split()
    for command in commands:
        _run((str(interpreter.with_name(command)), "--help"), folder)
    told = f"commands {', '.join(commands)}" if commands else "no commands"
    return f"{', '.join(packages) or 'no package'}; {told}; {len(missing)} modules need an extra"


def top_levels(wheel: Path) -> list[str]:
    """Return the packages of a wheel. Raises WheelError if a name is not ours to take."""
    with ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    found = sorted(name for name in names if not name.endswith(".dist-info"))
    taken = [name for name in found if name != "flotilla" and not name.startswith("flotilla_")]
    if taken:
        raise WheelError(f"it installs {', '.join(taken)}, which a user's project may have")
    return found


def _run(command: Sequence[str], folder: str) -> str:
    # Nothing of a checkout, nor of whoever starts this.
    environment = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise WheelError(f"{' '.join(command[:4])} ...: {done.stderr.strip() or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
