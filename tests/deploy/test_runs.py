"""The run specs of deploy/runs: requested resources exist; unsupported runs are refused."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flotilla_common.process import own_packages
from flotilla_common.process.spec_commands import resolve_command
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.backends.sky.machine_candidates import check_candidates, check_shared_network
from flotilla_launcher.cli.app import app
from flotilla_launcher.control.prepare_commands import parse_prepare_tables
from flotilla_launcher.run_spec import RunSpec, parse_spec
from tests.launcher.doctor.test_vision_size import QWEN3_VL_8B, folder_of
from tests.support.doctor import forged_services
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
        assert prepare.command[0] == "flotilla"
        program, *options, module = resolve_command(prepare.command)[:4]
        # `-P`: files in the working directory shadow nothing.
        assert (program, options) == (sys.executable, ["-P", "-m"])
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_what_is_prepared_needs_packages_that_are_there_and_no_folder_of_a_checkout(
    path: Path,
) -> None:
    made = parse_prepare_tables(spec_of(path))
    needs = [need for prepare in made for need in prepare.needs]
    named = [need.removeprefix("package:") for need in needs if need.startswith("package:")]
    assert all(own_packages.folder_of(name) is not None for name in named)
    assert not [need for need in needs if need.startswith(("services/", "environments/"))]


@pytest.mark.parametrize("path", SPECS, ids=STEMS)
def test_every_task_file_is_prepared_by_the_spec_itself(path: Path) -> None:
    spec = spec_of(path)
    files = {each["tasks"] for each in spec["learner"]["eval"]["sets"]}
    if spec["learner"].get("objective") != "sft":
        files.add(spec["learner"]["tasks"])
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


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """`flotilla plan deploy/runs/vl-8b.toml --gpus SIZE`, where the model's settings are in the
    hub's cache, and nothing else."""
    model = tmp_path / "hub/models--Qwen--Qwen3-VL-8B-Instruct"
    commit = "1" * 40
    for path, text in (("refs/main", commit), (f"snapshots/{commit}/config.json", "")):
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_text(text)
    folder_of(model / "snapshots" / commit, QWEN3_VL_8B)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)

    def plan(gpus: str) -> Result:
        words = ["plan", "deploy/runs/vl-8b.toml", "--gpus", gpus, "--out", str(tmp_path / "out")]
        with forged_services():
            return CliRunner().invoke(app, words)

    return plan


@pytest.mark.parametrize("gpus", ["5x80GB", "5x141GB"])
def test_the_vision_run_fits_gpus_of_these_sizes(
    gpus: str, planned: Callable[[str], Result]
) -> None:
    done = planned(gpus)
    assert done.exit_code == 0, done.output
    [memory] = [line for line in done.output.splitlines() if "memory:" in line]
    assert "8.77 B parameters" in memory
    assert "2.3 GiB for pictures" in memory
    warned = [line for line in done.output.splitlines() if line.startswith("warning")]
    assert all("GiB" not in line for line in warned), warned
    assert "vl-8b-rollout.yaml" in done.output


def test_the_vision_run_is_refused_on_gpus_that_are_too_small(
    planned: Callable[[str], Result],
) -> None:
    done = planned("5x20GB")
    assert done.exit_code == 2, done.output
    assert re.search(r"for KV beside 16\.3 GiB of weights", done.output), done.output
