"""The run specs of deploy/runs: requested resources exist; unsupported runs are refused."""

import importlib.util
import re
from pathlib import Path, PurePath
from typing import Any

import pytest

from services.common.spec.config import canonical_json
from services.common.spec.spec_loading import load_spec
from services.launcher.backends.sky.machine_candidates import check_candidates, check_shared_network
from services.launcher.cli.plan_memory import describe_memory
from services.launcher.control.prepare_commands import parse_prepare_tables
from services.launcher.doctor.memory_estimate import GIB
from services.launcher.run_spec import BadSpecError, RunSpec, parse_spec
from tests.launcher.doctor.test_vision_size import QWEN3_VL_8B, folder_of
from tests.support.repository import ROOT

SPECS = sorted((ROOT / "deploy/runs").glob("*.toml"))
STEMS = [path.stem for path in SPECS]
# The specs that request machines from SkyPilot, at once or with --launcher.backend=sky.
ELSEWHERE = [path for path in SPECS if "[launcher.sky" in path.read_text()]
SERVICES = ("learner", "env_gateway", "rollout")


def spec_of(path: Path, *overrides: str) -> dict[str, Any]:
    return load_spec(path, overrides)


def plan_of(path: Path, *overrides: str) -> RunSpec:
    return parse_spec(canonical_json(spec_of(path, *overrides)))


def test_the_specs_that_are_promised_are_there() -> None:
    promised = {"local", "tiny-slurm", "openenv-fleet-grpo", "qwen3-8b", "qwen3-32b", "vl-8b"}
    assert promised <= set(STEMS)


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_a_run_has_the_name_of_its_file(path: Path) -> None:
    assert spec_of(path)["name"].replace("_", "-") == path.stem.replace("_", "-")


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_what_is_prepared_is_prepared_by_modules_that_are_there(path: Path) -> None:
    for prepare in parse_prepare_tables(spec_of(path)):
        program, *options, module = prepare.command[:4]
        # `-P`: files in the working directory shadow nothing.
        assert (program, options) == ("python", ["-P", "-m"])
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_every_task_file_is_prepared_by_the_spec_itself(path: Path) -> None:
    spec = spec_of(path)
    files = {spec["learner"]["tasks"]} | {each["tasks"] for each in spec["learner"]["eval"]["sets"]}
    words = {word for prepare in parse_prepare_tables(spec) for word in prepare.command}
    # A file, or the folder that has it.
    assert all({path, str(PurePath(path).parent)} & words for path in files)


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_no_price_is_written_down(path: Path) -> None:
    """Prices change; `flotilla plan` looks them up."""
    assert not re.search(r"\$ ?\d|USD|per hour", path.read_text())


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_figures_of_gpu_memory_are_marked_as_computed(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\d GB", text) or "computed, not measured" in text


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_the_commands_of_a_header_name_the_file_itself_and_keys_that_exist(path: Path) -> None:
    commands = re.findall(
        r"^# +((?:flotilla|python) [^#\n]*(?:\\\n# +[^\n]*)*)", path.read_text(), re.M
    )
    assert commands
    for command in commands:
        words = command.replace("\\\n#", " ").split()
        assert f"deploy/runs/{path.name}" in words
        plan_of(path, *(word for word in words if re.match(r"--[\w.]+=", word)))


@pytest.mark.parametrize("path", ELSEWHERE, ids=[path.stem for path in ELSEWHERE])
def test_requested_machines_exist_at_clouds(path: Path) -> None:
    sky = plan_of(path).config.sky
    assert [problem for service in SERVICES for problem in check_candidates(sky, service)] == []
    assert check_shared_network(sky) == []
    command = sky.setup.split()
    assert command[0] == "make" or (ROOT / command[1]).is_file()


@pytest.mark.parametrize("path", ELSEWHERE, ids=[path.stem for path in ELSEWHERE])
def test_what_rents_gpus_has_an_end(path: Path) -> None:
    config = plan_of(path).config
    machines = [getattr(config.sky, service).candidates for service in SERVICES]
    if any(machine.accelerators for candidates in machines for machine in candidates):
        assert config.max_hours is not None


def test_no_spec_says_that_it_does_not_train() -> None:
    for path in SPECS:
        assert not re.search("VISION|NOT TRAIN", path.read_text()), path.name


@pytest.mark.parametrize("gib", [80, 141])
async def test_the_vision_run_fits_gpus_of_these_sizes(tmp_path: Path, gib: int) -> None:
    model = folder_of(tmp_path, QWEN3_VL_8B)
    planned = plan_of(ROOT / "deploy/runs/vl-8b.toml", f"--policy.model={model}")
    lines = await describe_memory(planned, tmp_path, (gib * GIB,) * 5)
    assert len(lines) == 1, lines
    assert "8.77 B parameters" in lines[0]
    assert "2.3 GiB for pictures" in lines[0]


async def test_the_vision_run_is_refused_on_gpus_that_are_too_small(tmp_path: Path) -> None:
    model = folder_of(tmp_path, QWEN3_VL_8B)
    planned = plan_of(ROOT / "deploy/runs/vl-8b.toml", f"--policy.model={model}")
    with pytest.raises(BadSpecError, match=r"for KV beside 16\.3 GiB of weights"):
        await describe_memory(planned, tmp_path, (20 * GIB,) * 5)
