"""A launcher of rented machines checks a spec where no service could run."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher.runs import SERVICES
from tests.launcher.harness import REPOSITORY

# What SkyPilot's environment lacks.
MISSING = ("torch", "safetensors", "transformers", "vllm", "tokenizers", "huggingface_hub")
CHECK = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = ["service", "--config", {spec!r}, "--check-config"]
runpy.run_module({module!r}, run_name="__main__")
"""


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_checks_its_configuration_without_its_packages(service: str) -> None:
    spec = Path("deploy/runs/local.toml")
    script = CHECK.format(missing=MISSING, spec=str(spec), module=f"services.{service}")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
