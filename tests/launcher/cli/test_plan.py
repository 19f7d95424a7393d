"""`flotilla plan`, and the task files in deploy/sky that it made."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.cli import plan as command
from flotilla_launcher.cli.options import parse_gpus
from flotilla_launcher.doctor.findings import Finding
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.run_spec import RunSpec, parse_spec
from tests.deploy.test_memory import SHAPES
from tests.support.doctor import sections, spec
from tests.support.repository import ROOT
from tests.support.sky_launches import VMS

_RUNS = Path("runs")
_SPECS = sorted((ROOT / "deploy/runs").glob("*.toml"))
# The machines that deploy/runs/qwen3-8b.toml requests.
_LAMBDA = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cpu_4x_general,,,4.0,16.0,0.1,us-south-3,,
gpu_1x_h100_sxm5,H100,1.0,26.0,225.0,3.5,us-south-3,,
gpu_2x_h100_sxm5,H100,2.0,52.0,450.0,6.5,us-south-3,,
gpu_1x_h100_sxm5,H100,1.0,26.0,225.0,1.5,us-east-1,,
"""
_MADE = {
    "openenv-fleet-grpo": True,
    "qwen3-8b": False,
    "qwen3-32b": False,
    "tiny-slurm": False,
}


@pytest.mark.parametrize("name", _MADE)
def test_the_task_files_in_deploy_are_what_plan_writes_today(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = Path("deploy/runs") / f"{name}.toml"
    read = parse_spec(canonical_json(load_spec(path)))
    flag = " --one-machine" if _MADE[name] else ""
    head = f"# Made by: flotilla plan {path}{flag} --out deploy/sky\n"
    files = command.make_task_files(path, read, _RUNS, one_machine=_MADE[name])
    for file, text in files.items():
        assert (Path("deploy/sky") / file).read_text() == head + text, head[len("# Made by: ") :]


def test_deploy_has_no_task_file_that_no_spec_makes() -> None:
    for path in (ROOT / "deploy/sky").glob("*.yaml"):
        assert any(path.stem.startswith(name) for name in _MADE), path


def test_a_whole_run_on_one_machine_needs_its_key_and_takes_its_choices() -> None:
    text = (ROOT / "deploy/sky/openenv-fleet-grpo.yaml").read_text()
    task = yaml.safe_load(text)
    assert task["secrets"]["FLEET_API_KEY"] is None
    assert {"MODALITY", "MAX_TASKS"} <= set(task["envs"])
    assert "--data.max_tasks=$MAX_TASKS" in task["run"]
    assert task["resources"]["autostop"]["down"] is True


def test_a_plan_shows_machines_and_prices_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = tmp_path / ".sky/catalogs/v8/lambda"
    catalog.mkdir(parents=True)
    (catalog / "vms.csv").write_text(VMS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command.spec_check, "check_spec", _content)
    monkeypatch.setattr(command.plan_memory, "read_sections", _read_nothing)
    gpu = '[{infra = "lambda", accelerators = "H100:1"}]'
    changes = [f"--launcher.sky.{service}.any_of={gpu}" for service in ("learner", "rollout")]
    changes += ['--launcher.sky.env_gateway.any_of=[{infra = "lambda", cpus = "4+"}]']
    changes += ["--launcher.max_hours=10.0", "--launcher.max_cost=23.9"]
    changes += ["--learner.checkpoint.remote=s3://bucket/prefix"]
    spec = Path("deploy/runs/local.toml")
    assert command.print_plan(spec, _RUNS, changes, tmp_path / "out", one_machine=False) == 0
    printed = capsys.readouterr().out
    assert "learner x 1: lambda H100:1 ($2.29/h); $2.29/h each" in printed
    assert "in total: $4.78/h" in printed
    assert "in launcher.max_hours, 10 h: $47.80 (env_gateway $2.00, learner $22.90" in printed
    assert "launcher.max_cost, $23.90, is reached in 5.0 h" in printed
    assert "warning" not in printed
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["local-env_gateway.yaml", "local-learner.yaml", "local-rollout.yaml"]
    assert "sky" not in {name.partition(".")[0] for name in sys.modules}


def test_a_plan_of_a_run_at_a_tinker_service_has_prices_of_tokens_and_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.spec_check, "check_spec", _content)
    monkeypatch.setattr(command.plan_memory, "read_sections", _read_nothing)
    content = spec(tmp_path, tmp_path, "learner.engine=tinker", "learner.lora.rank=8")
    content["rollout"]["engine"] = {}
    path = tmp_path / "run.json"
    path.write_text(canonical_json(content))
    gpu = '[{infra = "lambda", accelerators = "H100:1"}]'
    changes = [
        "--launcher.backend=sky",
        "--launcher.max_tokens=5000000",
        "--launcher.token_prices={prompt = 0.1, sample = 0.4, train = 0.3}",
        f"--launcher.sky.learner.any_of={gpu}",
    ]
    assert command.print_plan(path, _RUNS, changes, tmp_path / "out", one_machine=False) == 0
    printed = capsys.readouterr().out
    assert "$0.1 of prompts, $0.4 sampled, $0.3 trained; launcher.max_cost is not set" in printed
    assert "launcher.max_tokens: 5,000,000" in printed
    assert "memory: not computed, the weights are at the Tinker service" in printed
    assert "warning: launcher.sky.learner requests GPUs, and with learner.engine" in printed


@pytest.fixture(scope="module")
def offline() -> tuple[str, ...]:
    """A command that runs another one without any network."""
    no_client = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    for words in (("unshare", "-rn"), ("unshare", "-n")):
        if shutil.which("unshare") and not subprocess.run((*words, "true"), check=False).returncode:
            tried = subprocess.run(
                (*words, sys.executable, "-c", no_client),
                capture_output=True,
                text=True,
                check=False,
            )
            assert "Network is unreachable" in tried.stderr
            return words
    pytest.skip("needs namespaces of the network")


def _planned(offline: tuple[str, ...], home: Path) -> tuple[str, dict[str, list[Any]]]:
    """The output of `flotilla plan` for deploy/runs/qwen3-8b.toml, and its files."""
    words = ("-m", "flotilla_launcher.cli.app", "plan", "deploy/runs/qwen3-8b.toml")
    done = subprocess.run(
        (*offline, sys.executable, *words),
        cwd=ROOT,
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    output, *files = re.split(r"^# (.+[.]yaml)$", done.stdout, flags=re.MULTILINE)
    texts = zip(files[::2], files[1::2], strict=True)
    return output, {name: list(yaml.safe_load_all(text)) for name, text in texts}


@pytest.mark.slow
def test_a_plan_needs_no_network_and_no_catalog(offline: tuple[str, ...], tmp_path: Path) -> None:
    output, files = _planned(offline, tmp_path)
    assert "env_gateway x 1: lambda/us-south-3 4+ CPUs, 16+ GiB; price unknown each" in output
    assert "learner x 1: lambda/us-south-3 H100:2, 240+ GiB, disk 500 GB; price unknown" in output
    assert "rollout x 2: lambda/us-south-3 H100:1, disk 200 GB; price unknown each" in output
    assert "memory: not computed, the config.json of Qwen/Qwen3-8B is not on this machine" in output
    assert "in total: price unknown\n" in output
    names = {f"qwen3-8b-{service}.yaml" for service in ("env_gateway", "learner", "rollout")}
    made = {name: (ROOT / "deploy/sky" / name).read_text() for name in names}
    assert files == {name: list(yaml.safe_load_all(text)) for name, text in made.items()}


@pytest.mark.slow
def test_a_plan_knows_the_prices_of_a_catalog_without_a_network(
    offline: tuple[str, ...], tmp_path: Path
) -> None:
    catalog = tmp_path / ".sky/catalogs/v8/lambda"
    catalog.mkdir(parents=True)
    (catalog / "vms.csv").write_text(_LAMBDA)
    output, files = _planned(offline, tmp_path)
    assert "4+ CPUs, 16+ GiB ($0.10/h); $0.10/h each" in output
    assert "H100:2, 240+ GiB, disk 500 GB ($6.50/h); $6.50/h each" in output
    assert "H100:1, disk 200 GB ($3.50/h); $3.50/h each" in output
    assert "in total: $13.60/h\n" in output and "not known" not in output
    assert "in launcher.max_hours, 72 h: $979.20" in output
    assert len(files) == 3


@pytest.mark.parametrize("one_machine", [False, True])
@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("--seed=0", "go with the learner's machine"),
        ('--launcher.sky.learner.any_of=[{infra = "slurm"}]', "with the folder of their Slurm job"),
        ("--learner.mode=eval", ""),
        ("--learner.checkpoint.remote=file:///shared", ""),
    ],
)
def test_a_plan_warns_of_a_model_that_is_nowhere(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    lost: str,
    one_machine: bool,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command.spec_check, "check_spec", _content)
    monkeypatch.setattr(command.plan_memory, "read_sections", _read_nothing)
    spec = Path("deploy/runs/local.toml")
    assert command.print_plan(spec, _RUNS, [change], None, one_machine=one_machine) == 0
    printed = capsys.readouterr().out
    warning = "warning: learner.checkpoint.remote is not set"
    reported = [line for line in printed.splitlines() if line.startswith(warning)]
    assert len(reported) == bool(lost)
    assert all(lost in line for line in reported)
    assert all("set it to a URL that machines reach" in line for line in reported)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy/runs").glob("*.toml")), ids=lambda p: p.stem
)
def test_specs_that_rent_gpus_show_the_key_that_keeps_their_model(path: Path) -> None:
    config = parse_spec(canonical_json(load_spec(path))).config
    if any(machine.accelerators for machine in config.sky.learner.candidates):
        section = path.read_text().split("[learner.checkpoint]")[1].split("\n[")[0]
        assert "\n# remote = " in section


def test_an_impossible_wish_is_a_bad_spec(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    changes = ['--launcher.sky.rollout.any_of=[{infra = "lambda", use_spot = true}]']
    code = command.print_plan(
        Path("deploy/runs/local.toml"), _RUNS, changes, None, one_machine=False
    )
    assert code == 2
    assert "error: launcher.sky.rollout.any_of.0: lambda has no spot" in capsys.readouterr().out


async def _content(_: RunSpec) -> None:
    """Accept the spec without the services' checks, which take seconds."""


async def _read_nothing(_: RunContext) -> tuple[dict[str, Any], list[Finding]]:
    """Return no section; the services would take seconds to list theirs."""
    return {}, []


def _plan_8b(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], gpus: str = ""
) -> int:
    """Plan deploy/runs/qwen3-8b.toml by the shape of its model."""

    async def read(context: RunContext) -> tuple[dict[str, Any], list[Finding]]:
        return sections(context.plan.tables), []

    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command.spec_check, "check_spec", _content)
    monkeypatch.setattr(command.plan_memory, "read_sections", read)
    return command.print_plan(
        Path("deploy/runs/qwen3-8b.toml"),
        _RUNS,
        [f"--policy.model={folder}", *changes],
        folder / "out",
        one_machine=False,
        gpus=parse_gpus(gpus).each if gpus else (),
    )


@pytest.mark.slow
def test_a_plan_shows_what_a_rank_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _plan_8b(tmp_path, monkeypatch, []) == 0
    output = capsys.readouterr().out
    assert re.search(r"^memory: 8.19 B parameters; learner .* GiB a GPU \(parameters", output, re.M)


@pytest.mark.slow
def test_a_plan_of_a_run_that_does_not_fit_is_refused_with_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ["--learner.rank.shard=false", "--learner.rank.offload_optimizer=false"]
    four = [*whole, "--learner.rank.processes=4", "--launcher.learner.gpus=4"]
    assert _plan_8b(tmp_path, monkeypatch, four, "8x80GB") == 2
    output = capsys.readouterr().out
    assert "a GPU of the machine of --gpus has 80.0 GiB for the learner's" in output
    assert "; set learner.rank.shard = true" in output
    assert not (tmp_path / "out").exists()
    assert _plan_8b(tmp_path, monkeypatch, [*four, "--learner.rank.shard=true"], "8x80GB") == 0


@pytest.mark.parametrize("text", ["4", "4x", "x80", "0x80", "4x80TB", "-1x80GB"])
def test_gpus_are_given_by_number_and_memory(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 4x80GB"):
        parse_gpus(text)
    assert parse_gpus("2x24gb").each == (24 * 2**30,) * 2


def test_one_machine_with_fewer_gpus_than_the_services_get_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command.spec_check, "check_spec", _content)
    monkeypatch.setattr(command.plan_memory, "read_sections", _read_nothing)
    spec, out = Path("deploy/runs/qwen3-8b.toml"), tmp_path / "out"
    assert command.print_plan(spec, _RUNS, [], out, one_machine=True) == 2
    printed = capsys.readouterr().out
    assert "launcher.SERVICE.gpus come to 4 for all replicas" in printed
    assert "has 2: name a machine with 4, such as H100:4" in printed
    assert not out.exists()
    larger = ["--launcher.sky.learner.ordered.0.accelerators=H100:4"]
    assert command.print_plan(spec, _RUNS, larger, out, one_machine=True) == 0
    task = yaml.safe_load((out / "qwen3-8b.yaml").read_text())
    assert "H100:4" in str(task["resources"])
