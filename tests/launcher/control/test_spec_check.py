"""A launcher of rented machines checks a spec where no service could run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.control.spec_check import check_spec
from flotilla_launcher.run_spec import BadSpecError, RunSpec, parse_spec
from flotilla_launcher.state import SERVICES
from tests.support.doctor import forged_services, service_forge
from tests.support.repository import ROOT

# Packages that SkyPilot's environment lacks.
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
    script = CHECK.format(missing=MISSING, spec=str(spec), module=f"flotilla_{service}")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


KILLED = """
import asyncio
from pathlib import Path
from flotilla_common.spec.config import (canonical_json)
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.run_spec import parse_spec; from flotilla_launcher.control import spec_check
asyncio.run(spec_check.check_spec(parse_spec(canonical_json(load_spec(
    Path({spec!r}), ["policy.model=on/the-hub"])))))
"""


def test_a_check_that_is_killed_leaves_no_file_behind(tmp_path: Path) -> None:
    script = KILLED.format(spec="deploy/runs/local.toml")
    checking = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    services: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(services) < len(SERVICES) and time.monotonic() < deadline:
        services = psutil.Process(checking.pid).children()
        time.sleep(0.005)
    checking.kill()
    checking.wait()
    psutil.wait_procs(services, timeout=60)
    assert len(services) == len(SERVICES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "--policy.max_model_len=64",
            "policy.max_model_len: 64 is less than rollout.max_input_length",
        ),
        (
            "--rollout.engine.options.load_format=pt",
            "rollout.engine.options.load_format: weights are read as safetensors",
        ),
    ],
)
def test_what_a_rollout_cannot_run_is_refused_before_anything_starts(
    override: str, words: str
) -> None:
    command = ("-m", "flotilla_rollout", "--check-config", "--config", "deploy/runs/local.toml")
    done = subprocess.run(
        service_forge().python_command(*command, override),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


async def test_what_several_rented_machines_cannot_carry_is_refused_before_they_are() -> None:
    def plan_of(**nodes: int) -> RunSpec:
        spec = load_spec(ROOT / "deploy/runs/local.toml", ["--learner.rank.shard=true"])
        spec["rollout"]["engine"]["tensor_parallel"] = 3
        sky = {service: {"num_nodes": count} for service, count in nodes.items()}
        spec["launcher"] = {"backend": "sky", "sky": sky}
        return parse_spec(canonical_json(spec))

    with forged_services():
        await check_spec(plan_of(rollout=1, learner=1))
        with pytest.raises(BadSpecError) as refused:
            await check_spec(plan_of(rollout=2, learner=2))
    for service, said in (
        ("rollout", "rollout.engine.nodes: 2, but .* make 3 workers"),
        ("learner", "set learner.rank.shard_within_node = true"),
    ):
        refused.match(rf"with launcher.sky.{service}.num_nodes.*\n?.*{said}")


async def test_a_module_in_place_of_a_service_that_imports_an_old_name_is_told_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "from services.common.process.service_main import run_service_process"
    (tmp_path / "my_learner.py").write_text(f"{line}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    spec = load_spec(ROOT / "deploy/runs/local_sft.toml", ["--launcher.modules.learner=my_learner"])
    plan = parse_spec(canonical_json({**spec, "learner": {"objective": "sft"}}))
    assert plan.services == ("learner",)
    with pytest.raises(BadSpecError) as refused:
        await check_spec(plan)
    new = "flotilla_common.process.service_main"
    assert str(refused.value).endswith(f"services.common.process.service_main is {new} now")
