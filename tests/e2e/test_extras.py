"""Each service installs alone, from its own extra, and starts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "env_gateway": "env-gateway",
    "learner": "learner",
    "launcher": "launcher",
    "rollout": "rollout-cpu",
}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("service", "extra"), EXTRAS.items())
def test_a_service_installs_alone_and_says_how_it_is_used(
    service: str, extra: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    run("git", "clone", "-q", ROOT, source, cwd=tmp_path)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "-c", source / "requirements/torch-cpu.txt", f"{source}[{extra}]", cwd=tmp_path)
    text = run(python, "-m", f"services.{service}", "--help", cwd=tmp_path)
    assert "--config" in text or "train" in text
