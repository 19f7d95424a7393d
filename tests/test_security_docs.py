"""docs/security.md names what there is."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from flotilla_common.spec.config import ConfigModel
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_learner.config.learner import IntakeConfig, LearnerConfig
from tests.support.repository import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
SECTIONS = {"env_gateway": EnvGatewayConfig, "launcher": LauncherConfig, "learner": LearnerConfig}


def keys_of(cls: type[ConfigModel], prefix: str) -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield f"{prefix}.{name}"
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, ConfigModel):
                yield from keys_of(each, f"{prefix}.{name}")


def test_keys_are_keys() -> None:
    known = {key for name, cls in SECTIONS.items() for key in keys_of(cls, name)}
    named = re.findall(r"`((?:env_gateway|launcher|learner)\.[a-z_.]+)", PAGE)
    assert len(named) > 10
    assert sorted(set(named) - known - {"env_gateway.md", "launching.md"}) == []


def test_links_lead_to_files_and_targets_are_targets() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PAGE + (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / "docs" / link).exists() or (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", PAGE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_defaults_are_the_defaults() -> None:
    intake: Any = IntakeConfig()
    mib = [size // 2**20 for size in (intake.worker_bytes, intake.total_bytes)]
    assert f"| {mib[0]} MiB, {mib[1]} MiB |" in PAGE
    assert f"| {intake.stall_s:g} s |" in PAGE
