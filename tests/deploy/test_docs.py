"""Commands, keys and links in the pages about launching exist."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from flotilla_common.spec.config import ConfigModel
from flotilla_launcher.cli.app import app
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.doctor.probe_list import PROBES
from flotilla_learner.config.learner import LearnerConfig
from tests.support.repository import ROOT

PAGES = (
    *("docs/launching.md", "docs/doctor.md", "docs/slurm.md", "docs/workflows.md"),
    "docs/tinker_training.md",
)
each_page = pytest.mark.parametrize("page", PAGES)
SECTIONS = {"launcher": LauncherConfig, "learner": LearnerConfig}


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def keys_of(cls: type[ConfigModel], prefix: str) -> Iterator[str]:
    """All keys below a section, and the tables on the way."""
    for name, field in cls.model_fields.items():
        key = f"{prefix}.{name}"
        yield key
        for model in (field.annotation, *get_args(field.annotation)):
            if isinstance(model, type) and issubclass(model, ConfigModel):
                yield from keys_of(model, key)


@each_page
def test_links_lead_to_files(page: str) -> None:
    for link in re.findall(r"\]\((?!https:)([^)#]+)", text_of(page)):
        assert ((ROOT / page).parent / link).exists(), link
    for path in re.findall(r"\bdeploy/[\w./-]+\.\w+", text_of(page)):
        assert (ROOT / path).exists(), path


@each_page
def test_commands_are_commands(page: str) -> None:
    names = (command.name or command.callback.__name__ for command in _commands())
    known = {name.replace("_", "-") for name in names}
    used = re.findall(r"(?:bin/|^|`)flotilla +([a-z-]+)", text_of(page), re.MULTILINE)
    assert used
    assert set(used) <= known
    for module in re.findall(r"python -m ([\w.]+)", text_of(page)):
        assert importlib.util.find_spec(module) is not None, module


def _commands() -> list[Any]:
    return list(app.registered_commands)


@each_page
def test_keys_are_keys(page: str) -> None:
    """Keys appear as options of a command, or alone in backticks."""
    key = r"((?:launcher|learner)(?:\.[a-z_]+)+)"
    named = set(re.findall(rf"(?:--|`){key}(?=[`= .])", text_of(page)))
    known = {key for name, cls in SECTIONS.items() for key in keys_of(cls, name)}
    assert named
    assert sorted(named - known - {"launcher.json"}) == []


def test_every_probe_of_the_doctor_is_listed() -> None:
    page = text_of("docs/doctor.md")
    assert [probe.name for probe in PROBES if f"`{probe.name}`" not in page] == []
