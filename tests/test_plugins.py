"""The stable module of each service from which people's own modules import."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

# What each of them does without; the packages that have a module of this kind.
HEAVY = {
    "flotilla_learner": ("torch", "transformers", "vllm", "safetensors", "ray"),
    "flotilla_env_gateway": ("pydantic", "numpy", "grpc", "aiohttp", "mcp"),
    "flotilla_reading": ("torch", "numpy", "pyarrow", "matplotlib", "pydantic"),
}
IMPORTED = re.compile(r"from (flotilla_\w+)\.plugins import ([^\n(]+)")
OTHERS = re.compile(r"^(?:from|import) (flotilla_\w+(?:\.\w+)*)", re.MULTILINE)
# A library for programs that play episodes, which the gateway never imports.
CLIENT = "flotilla_env_gateway.clients.fleet_task_env"


def test_docs_import_for_plugins_from_there_and_each_name_is_there() -> None:
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.S)]
    named = [
        (p, n)
        for block in blocks
        for p, names in IMPORTED.findall(block)
        for n in re.split(r",\s*", names.strip())
    ]
    assert {package for package, _ in named} == set(HEAVY)
    for package, name in named:
        module = importlib.import_module(f"{package}.plugins")
        assert name in module.__all__
    modules = {module for block in blocks for module in OTHERS.findall(block)}
    assert modules == {CLIENT, *(f"{package}.plugins" for package in HEAVY)}


@pytest.mark.parametrize("package", HEAVY)
def test_the_first_import_is_cheap(package: str) -> None:
    program = f"""
import sys
from {package} import plugins
loaded = set({HEAVY[package]!r}) & set(sys.modules)
print(sorted(loaded), sorted(set(plugins.__all__) - set(vars(plugins))))
"""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # Those that need torch are looked up when they are used, in tests/learner/algo.
    late = ["LOSSES", "LossInput", "TokenLoss"] if package == "flotilla_learner" else []
    assert done.stdout == f"[] {late}\n", done.stderr
